"""How a model is trained, as far as its memory depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import ModelSizes, Projection

METHODS = ("full", "lora", "qlora")
SHARDED = ("FSDP2", "ZeRO-3", "expert parallelism")
PARALLEL = ("one GPU", "DDP", *SHARDED)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained.

    method: of METHODS. parallel: of PARALLEL, over `gpus`. tokens: of a step on each GPU, in sequences of `sequence`.
    weights: "bf16" or "fp32", of what is trained in full; fp32 weights compute in bf16 by autocast. optimizer: "adam", or
    "adam8bit", which steps in backward. experts, linear: format of frozen experts and of the attention's linear layers,
    "bf16" or a packed one. r, experts_r: ranks; 0: no adapters there. targets: the attention's adapted linear layers;
    None: all. checkpointing, liger; save: what a layer keeps. extra_rows: of token rounding, for each expert. attention:
    its implementation; None: the model's own.
    """

    method: str
    tokens: int
    sequence: int = 4096
    parallel: str = "one GPU"
    gpus: int = 1
    weights: str = "bf16"
    optimizer: str = "adam"
    experts: str = "bf16"
    linear: str = "bf16"
    r: int = 16
    experts_r: int = 16
    targets: tuple[str, ...] | None = None
    checkpointing: bool = True
    liger: bool = True
    save: str = "preactivation"
    extra_rows: int = 0
    attention: str | None = None

    @property
    def full(self) -> bool:
        """Whether all weights are trained."""
        return self.method == "full"

    @property
    def fp32_stream(self) -> bool:
        """Whether hidden states between the layers are in fp32."""
        return self.full and self.weights == "fp32" and self.parallel == "one GPU"

    @property
    def shards(self) -> int:
        """Over how many GPUs weights are sharded."""
        return self.gpus if self.parallel in SHARDED else 1

    def adapted(self, sizes: ModelSizes) -> list[Projection]:
        """The attention's linear layers that have adapters."""
        return [p for p in sizes.projections if (self.targets is None or p.name in self.targets) and self.r]
