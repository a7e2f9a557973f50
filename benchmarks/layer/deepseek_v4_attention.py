"""One attention layer of DeepSeek-V4-Flash, frozen, forward and backward: eager beside pieces of queries.

    python -m benchmarks.layer.deepseek_v4_attention [--csv FILE]
    python -m benchmarks.layer.deepseek_v4_attention --device cpu --csv /tmp/v4.csv    # checks the script, at small sizes

Sliding, heavily compressed and sparse layers at full widths with random weights in bf16, 4,096 to 65,536 tokens. Picked
keys are masked or gathered: `GATHERED_FROM` of sonicmoe_hf/attention/deepseek_v4.py chooses. Errors are those of the
output and of the input's gradient beside eager, in bf16.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from transformers import DeepseekV4Config
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

from benchmarks.common.command import Command
from benchmarks.common.table import Rows
from benchmarks.common.timing import release, synchronize, waited_times
from sonicmoe_hf.attention import deepseek_v4, indexers
from sonicmoe_hf.tools.comparing import relative_error

SLIDING, HEAVY, SPARSE = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"
EAGER, MASKED, GATHERED = "eager", "pieces, keys masked", "pieces, keys gathered"
ALWAYS, NEVER = 0.001, 10**9  # of GATHERED_FROM
CASES = (  # attention, kind of layer, tokens as multiples of 4,096
    *((EAGER, kind, 1) for kind in (SLIDING, HEAVY, SPARSE)),
    *((MASKED, kind, length) for kind in (SLIDING, HEAVY) for length in (1, 4, 16)),
    *((attention, SPARSE, length) for length in (1, 4, 16) for attention in (MASKED, GATHERED)),
)
TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32,
    "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16, "sliding_window": 32,
}  # fmt: skip


class AttentionStep(NamedTuple):
    """A layer, its input [1, S, H] and the other arguments of its forward."""

    layer: DeepseekV4Attention
    hidden: torch.Tensor
    arguments: dict

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the output and the gradient of the input."""
        self.hidden.grad = None
        out, _ = self.layer(self.hidden, **self.arguments)
        out.backward(self.hidden.detach())
        return out.detach(), self.hidden.grad


def make_step(attention: str, kind: str, length: int, device: str) -> AttentionStep:
    """Make the step of a layer, from one seed."""
    sizes = TINY if device == "cpu" else {}
    config = DeepseekV4Config(num_hidden_layers=1, layer_types=[kind], **sizes)
    config._attn_implementation = EAGER if attention == EAGER else "torch_pieces"
    torch.manual_seed(0)
    with torch.device(device):
        layer = DeepseekV4Attention(config, 0).to(torch.bfloat16).requires_grad_(False)
        for parameter in layer.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5)
        hidden = torch.randn(1, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        positions = torch.arange(length)[None]
        angles = DeepseekV4RotaryEmbedding(config)
        embeddings = {name: angles(hidden, positions, layer_type=name) for name in ("main", "compress")}
    if attention != EAGER:
        indexers.use_our_forwards(layer)
    mask = create_sliding_window_causal_mask(
        config=config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=positions
    )
    arguments = {"position_embeddings": embeddings, "position_ids": positions, "attention_mask": mask}
    return AttentionStep(layer, hidden, arguments)


@functools.cache
def reference(kind: str, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a layer's output and gradient by eager attention, on the host."""
    out, gradient = make_step(EAGER, kind, length, device)()
    return out.cpu(), gradient.cpu()


def measure(table: Rows, attention: str, kind: str, length: int, compared: bool, device: str) -> None:
    """Add a row. compared: with eager, which takes no more tokens."""
    deepseek_v4.GATHERED_FROM = ALWAYS if attention == GATHERED else NEVER
    expected = reference(kind, length, device) if compared else None
    release()
    step = make_step(attention, kind, length, device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    try:
        results = step()
    except torch.OutOfMemoryError:
        print(f"{attention}  {kind}  {length}  out of memory", flush=True)
        return
    synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if device == "cuda" else 0.0
    errors = (
        ["", ""]
        if expected is None
        else [f"{relative_error(result.cpu(), exact):.1e}" for result, exact in zip(results, expected)]
    )
    del results
    times, _ = waited_times(lambda: (step(), None)[1], 3, 1)
    table.add(
        attention=attention,
        layer=kind,
        tokens=length,
        ms=f"{sorted(times)[1]:.1f}",
        peak_GiB=f"{peak:.2f}",
        output_error=errors[0],
        gradient_error=errors[1],
    )


def main() -> None:
    small = "--device cpu --csv /tmp/v4.csv"
    options = Command(__doc__, "deepseek_v4_attention.csv", small).parse_args()
    table, unit = Rows(options.csv, ("attention", "layer", "tokens")), 4096 if options.device == "cuda" else 128
    for attention, kind, multiple in CASES:
        measure(table, attention, kind, multiple * unit, multiple == 1, options.device)
    table.write()


if __name__ == "__main__":
    main()
