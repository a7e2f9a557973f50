"""vLLM in the trainer's process, with the adapter in use."""

from __future__ import annotations

from typing import Any

from .adapter_versions import Version


class EngineWithAdapter:
    """Stands in the place of vLLM's LLM: generates with the adapter, and keeps the experts that completions used.

    routed_experts: of the last call's completions, in their order; None for each where the engine returns none.
    """

    def __init__(self, llm: Any):
        self._llm, self._request = llm, None
        self.routed_experts: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def sleep(self, level: int = 1, **options: Any) -> Any:
        """Sleep at level 1, whatever TRL asks for: level 2 drops the base's weights, which only full ones would bring
        back."""
        return self._llm.sleep(level=1, **options)

    def generate(self, prompts: Any, **options: Any) -> list[Any]:
        """Generate as LLM does."""
        outputs = self._llm.generate(prompts, lora_request=self._request, **options)
        self.routed_experts = [completion.routed_experts for output in outputs for completion in output.outputs]
        return outputs

    def load(self, version: Version) -> None:
        """Take a version of the adapter into use, and drop the one before."""
        from vllm.lora.request import LoRARequest

        before = self._request
        options = {"is_3d_lora_weight": True} if version.is_3d else {}
        self._request = LoRARequest(version.name, version.number, str(version.folder), **options)
        if not self._llm.llm_engine.add_lora(self._request):
            raise RuntimeError(f"vLLM did not load the adapter in {version.folder}")
        if before is not None:
            self._llm.llm_engine.remove_lora(before.lora_int_id)

    def load_again(self) -> None:
        """Put the adapter in use back into the engine's slots, after a sleep."""
        if self._request is not None:
            self._llm.llm_engine.remove_lora(self._request.lora_int_id)
            self._llm.llm_engine.add_lora(self._request)
