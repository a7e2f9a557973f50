"""`vllm serve`, as TRL's client reaches it: what it was started with, and the adapters that it is told to load."""

from __future__ import annotations

import logging
import shlex
from typing import Any

import torch

from .adapter_versions import AdapterVersions, Version
from .serving import name_of

logger = logging.getLogger(__name__)
ENVIRONMENT = "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
COMPLETIONS = "/v1/completions"


class VllmServer:
    """A server, and the experts that its last completions used.

    Args:
        client: TRL's VLLMClient. versions: of the adapter. replay: whether it is to return experts. dtype: what the
            trainer computes in.
    """

    def __init__(self, client: Any, versions: AdapterVersions, replay: bool, dtype: torch.dtype):
        self.client, self.versions, self.replay, self.dtype = client, versions, replay, dtype
        self.routed_experts: list[Any] = []
        self.info: dict[str, Any] = {}
        self.info = self._read_info()
        self._check()
        self._choose_form()
        own = [model["id"] for model in self._models() if versions.is_own(model["id"])]
        versions.continue_after(own)
        self._served: list[str] = own  # of a run that was killed
        self._follow_completions()

    @property
    def base(self) -> str:
        """The model that it serves, as it was named to it."""
        return str(self.info["model_config"]["model"])

    def command(self) -> str:
        """Build the whole command line that starts such a server."""
        config = self.info["model_config"] if self.info else {}
        base = str(config.get("model") or self.client.model)
        flags = ["--enable-lora", "--max-lora-rank", str(self.versions.rank), "--max-loras", "2"]
        flags += ["--enable-mixed-moe-lora-format"] if self.versions.takes_3d else []
        flags += ["--enable-return-routed-experts"] if self.replay else []
        flags += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--dtype", name_of(self.dtype)]
        return f"{ENVIRONMENT} vllm serve {shlex.quote(base)} {' '.join(flags)}"

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"the vLLM server at {self.client.base_url} {reason}; start it with: {self.command()}")

    def _read_info(self) -> dict[str, Any]:
        response = self.client.session.get(f"{self.client.base_url}/server_info", params={"config_format": "json"})
        if response.status_code == 404:
            raise self._error("does not say how it was started")
        response.raise_for_status()
        return response.json()["vllm_config"]

    def _check(self) -> None:
        lora, rank = self.info.get("lora_config"), self.versions.rank
        outputs = self.info.get("aux_output_config") or {}
        if lora is None:
            raise self._error("takes no adapters")
        if lora["max_lora_rank"] < rank:
            raise self._error(f"takes adapters up to rank {lora['max_lora_rank']}, and this one needs {rank}")
        if lora["max_loras"] < 2:
            raise self._error("has room for one adapter, and a new one is loaded before the old one goes")
        if self.replay and not outputs.get("enable_return_routed_experts"):
            raise self._error("does not return the experts that it used")
        if self.info["parallel_config"]["data_parallel_size"] > 1:
            raise ValueError(
                f"the vLLM server at {self.client.base_url} has several replicas (--data-parallel-size), of which "
                "/v1/load_lora_adapter reaches one; start it with one, and more GPUs by --tensor-parallel-size"
            )
        served = str(self.info["model_config"]["dtype"]).removeprefix("torch.")
        if served != name_of(self.dtype):
            logger.warning(
                f"the vLLM server computes in {served} and the trainer in {name_of(self.dtype)}, so their "
                f"log-probabilities differ by the rounding; start the server with --dtype {name_of(self.dtype)}"
            )

    def _choose_form(self) -> None:
        """Choose the form of the adapter's files: PEFT's own, where vLLM takes that of it and was started for it."""
        takes_both = bool(self.info["lora_config"].get("enable_mixed_moe_lora_format"))
        self.versions.is_3d = self.versions.takes_3d and takes_both

    def _models(self) -> list[dict[str, Any]]:
        return self.client._get(f"{self.client.base_url}/v1/models")["data"]

    def _follow_completions(self) -> None:
        """Keep the experts beside the completions that TRL asks for."""
        post = self.client._post

        def post_and_keep(url: str, **options: Any) -> Any:
            answer = post(url, **options)
            if url.endswith(COMPLETIONS):
                self.routed_experts = [choice.get("routed_experts") for choice in answer["choices"]]
            return answer

        self.client._post = post_and_keep

    def load(self, version: Version) -> None:
        """Take a version of the adapter into use, and unload those before.

        Raises:
            ValueError: the server was started without runtime loading, or does not see the folder.
            RuntimeError: it says no for another reason.
        """
        body = {"lora_name": version.name, "lora_path": str(version.folder)}
        if version.is_3d:
            body["is_3d_lora_weight"] = True  # type: ignore[assignment]
        response = self.client.session.post(f"{self.client.base_url}/v1/load_lora_adapter", json=body)
        if response.status_code == 404 and "error" not in response.text:
            raise self._error("loads no adapters while it runs")
        if response.status_code == 404:
            raise ValueError(
                f"the vLLM server does not see {version.folder}, which it reads itself; give adapters_folder=, a folder "
                f"that server and trainer share. It said: {response.text}"
            )
        if response.status_code != 200:
            raise RuntimeError(
                f"the vLLM server did not load {version.folder}: {response.status_code}, {response.text}"
            )
        self.client.model = version.name
        for name in self._served:
            self.client.session.post(f"{self.client.base_url}/v1/unload_lora_adapter", json={"lora_name": name})
        self._served = [version.name]
