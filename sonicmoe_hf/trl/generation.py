"""TRL's VLLMGeneration, which sends adapters instead of weights."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from ..private.replaced import temporarily_replaced
from .adapter_versions import AdapterVersions
from .engine import EngineWithAdapter
from .functions import TrlClass
from .rollouts import GeneratedSequences
from .served_base import check_served_base
from .server import VllmServer
from .serving import Serving, dtype_of, name_of

NOT_RETURNED = (
    "vLLM returned no routed experts for some completion; start it with --enable-return-routed-experts (colocated it is "
    "so started) and without --pipeline-parallel-size, a decode context or speculative decoding that adapts its length"
)
WITH_IMAGES = "TRL asks a vLLM server about images by a request of which no routed experts are kept; give replay=False"


class AdapterGeneration(TrlClass):
    """VLLMGeneration's methods for adapters; stands before it among the bases of a class.

    sequences: what was generated since a rollout began, with the experts that vLLM used. sync_seconds: how long the last
    sync took.
    """

    sends_adapters = True  # what trainer.sampling looks for

    def __init__(self, *args: Any, serving: Serving, output_dir: str, replay: bool, **options: Any):
        self.serving, self.output_dir, self.replay = serving, output_dir, replay
        self.sequences, self.sync_seconds = GeneratedSequences(), 0.0
        super().__init__(*args, **options)

    def _init_vllm(self) -> None:
        """Start, or reach, an engine that takes adapters."""
        if not self._module().is_vllm_available():
            super()._init_vllm()  # raises TRL's error, which says what to install
        dtype = dtype_of(self.model, self.accelerator.mixed_precision)
        self.versions = AdapterVersions(
            self.model, self.accelerator, self.serving.folder(self.output_dir), self._engine_dtype(dtype)
        )
        if self.mode == "colocate":
            self.versions.is_3d = self.versions.takes_3d
            self._check_base(self.serving.served_base or self.model.name_or_path)
            llm: Any = self._module().LLM
            with temporarily_replaced(self._module(), "LLM", functools.partial(self._start, llm, dtype)):
                super()._init_vllm()
            return
        # weights stay where they are, so there is no group to send them by
        with temporarily_replaced(self._module().VLLMClient, "init_communicator", lambda client, device=0: None):
            super()._init_vllm()
        if self.accelerator.is_main_process:
            self.server = VllmServer(self.vllm_client, self.versions, self.replay, dtype)
            self._check_base(self.serving.served_base or self.server.base)
        self._broadcast_number()

    def _module(self) -> Any:
        import trl.generation.vllm_generation

        return trl.generation.vllm_generation

    def _engine_dtype(self, dtype: torch.dtype) -> torch.dtype:
        given = self.serving.vllm_options.get("dtype")
        return getattr(torch, str(given).removeprefix("torch.")) if given not in (None, "auto") else dtype

    def _broadcast_number(self) -> None:
        """Tell all ranks the number that versions go on after."""
        box = [self.versions.number]
        broadcast_object_list(box, from_process=0)
        self.versions.number = box[0]

    def _check_base(self, served: Any) -> None:
        if self.accelerator.is_main_process:
            check_served_base(self.model, str(served), is_given=self.serving.served_base is not None)

    def _start(self, llm: Any, dtype: torch.dtype, *args: Any, **options: Any) -> EngineWithAdapter:
        """Start vLLM's LLM as TRL does, with adapters, in the trainer's dtype."""
        ours: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": self.versions.rank,
            "dtype": name_of(dtype),
        }
        if self.versions.is_3d:
            ours["enable_mixed_moe_lora_format"] = True
        if self.serving.served_base is not None:
            ours["model"] = str(Path(self.serving.served_base).expanduser())
        if self.replay:
            ours["enable_return_routed_experts"] = True
            if not torch.accelerator.is_available():
                ours["enforce_eager"] = True  # compiled for CPUs, vLLM 0.32 records no experts
        return EngineWithAdapter(llm(*args, **{**options, **ours, **self.serving.vllm_options}))

    def sync_weights(self) -> None:
        """Publish the adapter, and have vLLM take it into use. All ranks call it."""
        started = time.perf_counter()
        version = self.versions.publish()
        if self.mode == "colocate":
            self._wake()
            self.llm.load(version)
        elif self.accelerator.is_main_process:
            self.server.load(version)
        self.accelerator.wait_for_everyone()
        self.sync_seconds = time.perf_counter() - started

    def _wake(self) -> None:
        if self.enable_sleep_mode:
            self._module().empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

    def generate(self, prompts, images, num_generations, profiler=None):
        """Generate as VLLMGeneration does, and keep the experts that completions used."""
        if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
            self._wake()  # TRL would send weights
            self.llm.load_again()
        if self.mode == "server" and self.accelerator.is_main_process:
            self.server.routed_experts = []  # else those of an earlier call
        result = super().generate(prompts, images, num_generations, profiler)
        if self.replay:
            self._keep(prompts, result[1])
        return result

    def _keep(self, prompts: list[list[int]], completions: list[list[int]]) -> None:
        """Keep the experts of this rank's share of the last call, as TRL takes its share of the tokens."""
        if self.mode == "colocate":
            experts, rank = self.llm.routed_experts, 0
            if self.tensor_parallel_size > 1:
                rank = torch.distributed.get_rank(group=self.tp_group)
        else:
            box = [self.server.routed_experts if self.accelerator.is_main_process else None]
            broadcast_object_list(box, from_process=0)
            experts, rank = box[0], self.accelerator.process_index
            if prompts and not experts:
                raise ValueError(WITH_IMAGES)
        own = experts[rank * len(prompts) : (rank + 1) * len(prompts)]
        if len(own) != len(prompts) or any(each is None for each in own):
            raise RuntimeError(NOT_RETURNED)
        for prompt, completion, each in zip(prompts, completions, own):
            self.sequences.add(prompt, completion, each)
