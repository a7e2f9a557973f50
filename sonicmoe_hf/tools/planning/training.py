"""The settings of a training that its memory depends on."""

from __future__ import annotations

from dataclasses import dataclass

METHODS = ("full", "lora", "qlora")
SHARDED = ("FSDP2", "ZeRO-3", "expert parallelism")
RANK = 16  # of LoRA in examples/finetune.py


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training of a model.

    method: of METHODS. parallel: "one GPU", "DDP" or one of SHARDED, over `gpus`. tokens: of a step on each GPU, in
    sequences of `sequence`. weights: "bf16" or "fp32", of what is trained in full; fp32 weights compute in bf16 by
    autocast. optimizer: "adam", or "adam8bit", which steps in backward. experts, linear: format of frozen experts and
    of the attention's linear layers, "bf16" or a packed one. r, experts_r: ranks; 0: no adapters there. targets: the
    attention's adapted linear layers; None: all. checkpointing; save: what a layer keeps; offloading: whether what is
    kept between checkpointed layers goes to host memory. liger: whether Liger's kernels compute the rest; "loss": its
    loss alone. extra_rows: of token rounding, for each expert. attention: its implementation; None: the model's own.
    expanded: how many packed weights of a layer backward has expanded at a time: 1, or where there is room 2; 0 where
    Hopper's kernels decode them, with few rows an expert, of which a plan, which knows no GPU, says nothing.
    experts_memory: bytes of experts that stay on the GPU while the others are in host memory; None: all are on the GPU.
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
    r: int = RANK
    experts_r: int = RANK
    targets: tuple[str, ...] | None = None
    checkpointing: bool = True
    offloading: bool = False
    liger: bool | str = True
    save: str = "preactivation"
    extra_rows: int = 0
    attention: str | None = None
    expanded: int = 1
    experts_memory: int | None = None

    @property
    def full(self) -> bool:
        """Tell whether all weights are trained."""
        return self.method == "full"

    @property
    def fp32_stream(self) -> bool:
        """Tell whether hidden states between the layers are in fp32."""
        return self.full and self.weights == "fp32" and self.parallel == "one GPU"

    @property
    def splits_experts(self) -> bool:
        """Tell whether ranks have experts of their own."""
        return self.parallel == "expert parallelism"

    @property
    def shards(self) -> int:
        """Count the GPUs over which weights are sharded."""
        return self.gpus if self.parallel in SHARDED else 1

    @property
    def width(self) -> int:
        """Bytes of a trained weight where it is kept."""
        return 4 if self.weights == "fp32" and self.parallel != "ZeRO-3" else 2
