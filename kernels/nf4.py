"""The codec of NF4 with double quantization, bit by bit as bitsandbytes has it (quantized.py says what is stored)."""

from __future__ import annotations

import torch

NF4_BLOCK = 64  # values of a row that share a scale
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

# where the parts of an NF4 weight's `state` lie
SCALE_MAP = slice(0, 256)  # the values that `scales` are indices into
VALUE_MAP = slice(256, 272)  # those of the weights' codes
SCALE_OFFSET = 272  # the mean of all scales
SCALE_SCALES = slice(273, None)  # of 256 scales each
SCALES_PER_SCALE = 256


def _nearest(scaled: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Indices of the nearest of the rising `values`, a tie going down (bitsandbytes' default kernel)."""
    return torch.bucketize(scaled, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


def to_nf4(blocks: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """The codes [N, K/2] of blocks [N, K/64, 64] whose largest magnitudes are absmax [N, K/64]."""
    scaled = (blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1)
    codes = _nearest(scaled, torch.tensor(NF4_VALUES, dtype=torch.float32, device=scaled.device)).view(
        blocks.shape[0], -1
    )
    return codes[:, 0::2] << 4 | codes[:, 1::2]


def _dynamic_map() -> torch.Tensor:
    """bitsandbytes' create_dynamic_map(): 256 values in [-1, 1], denser towards 0 (arXiv 1511.04561)."""
    values = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32, device="cpu")
        means = ((bounds[:-1] + bounds[1:]) / 2.0) * 10 ** (i - 6)
        values += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


def quantize_scales(absmax: torch.Tensor, scales: torch.Tensor, state: torch.Tensor, offset: torch.Tensor) -> None:
    """Fill `scales` [n] and `state` from absmax [n]: blocks of 256 less the offset, in 8 bits."""
    values = _dynamic_map().to(absmax.device)
    size = -absmax.numel() % SCALES_PER_SCALE
    blocks = torch.nn.functional.pad(absmax - offset, (0, size)).view(-1, SCALES_PER_SCALE)
    largest = blocks.abs().amax(-1)
    scaled = (blocks * (1.0 / largest.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1)
    scales.copy_(_nearest(scaled, values).view(-1)[: scales.numel()])
    state[SCALE_MAP] = values
    state[VALUE_MAP] = torch.tensor(NF4_VALUES, dtype=torch.float32, device=state.device)
    state[SCALE_OFFSET] = offset
    state[SCALE_SCALES] = largest


def expert_of_nf4(packed):
    """expert -> its weight as fp32 [blocks, 64]; packed: a Quantized."""
    codes, scales, state = packed
    assert state is not None  # NF4 has one
    num_scales = scales[0].numel()
    values, scale_map = state[VALUE_MAP], state[SCALE_MAP]

    def expand(expert):
        first = expert * num_scales
        block = torch.arange(first, first + num_scales, dtype=torch.int64, device=codes.device) // SCALES_PER_SCALE
        absmax = scale_map[scales[expert].view(-1).int()] * state[SCALE_SCALES][block] + state[SCALE_OFFSET]
        bytes_ = codes[expert]
        pairs = torch.stack((values[(bytes_ >> 4).int()], values[(bytes_ & 15).int()]), dim=-1)
        return pairs.view(-1, NF4_BLOCK) * absmax.unsqueeze(-1)

    return expand
