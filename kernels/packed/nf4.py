"""NF4 with double quantization, bit by bit as bitsandbytes has it."""

from __future__ import annotations

import math
from functools import partial

import torch

from .format import Format, Quantized, Shapes, in_fp32
from .grid import Grid, Rounded

NF4_BLOCK = 64  # values of a row that share a scale
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

# where the numbers of an NF4 weight's `state` lie
SCALE_MAP = slice(0, 256)  # the values that `scales` are indices into
VALUE_MAP = slice(256, 272)  # those of the weights' codes
SCALE_OFFSET = 272  # the mean of all scales
SCALE_SCALES = slice(273, None)  # of 256 scales each
SCALES_PER_SCALE = 256


def _nearest(scaled: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Find the indices of the nearest of the rising `values`; ties go down (bitsandbytes' default kernel)."""
    return torch.bucketize(scaled, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


def to_nf4(blocks: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Quantize blocks [N, K/64, 64] whose largest magnitudes are absmax [N, K/64] to codes [N, K/2]."""
    scaled = (blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1)
    codes = _nearest(scaled, torch.tensor(NF4_VALUES, dtype=torch.float32, device=scaled.device)).view(
        blocks.shape[0], -1
    )
    return codes[:, 0::2] << 4 | codes[:, 1::2]


def _dynamic_map() -> torch.Tensor:
    """Compute bitsandbytes' create_dynamic_map(): 256 values in [-1, 1], denser towards 0 (arXiv 1511.04561)."""
    values = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32, device="cpu")
        means = ((bounds[:-1] + bounds[1:]) / 2.0) * 10 ** (i - 6)
        values += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


def quantize_scales(absmax: torch.Tensor, scales: torch.Tensor, state: torch.Tensor, offset: torch.Tensor) -> None:
    """Quantize absmax [n], less the offset, to 8 bits in blocks of 256: fill `scales` [n] and `state`."""
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


def _absmax(packed: Quantized, expert: int, scales: torch.Tensor) -> torch.Tensor:
    """Expand the scales [N, K/64] of an expert to fp32."""
    state, first = packed.state, expert * scales.numel()
    assert state is not None
    indices = torch.arange(first, first + scales.numel(), dtype=torch.int64, device=scales.device)
    scales_of_scales = state[SCALE_SCALES][indices // SCALES_PER_SCALE].view(scales.shape)
    return state[SCALE_MAP][scales.int()] * scales_of_scales + state[SCALE_OFFSET]


def _neighbours(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find NF4's values below and above; beyond all of them the last two."""
    values = torch.tensor(NF4_VALUES, dtype=torch.float32, device=scaled.device)
    low = torch.bucketize(scaled, values[1:-1], right=True, out_int32=True)
    return values[low], values[low + 1]


def _codes(scaled: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(NF4_VALUES, dtype=torch.float32, device=scaled.device)
    codes = _nearest(scaled, values)
    return codes[:, 0::2] << 4 | codes[:, 1::2]


def _values(codes: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(NF4_VALUES, dtype=torch.float32, device=codes.device)
    return torch.stack((values[(codes >> 4).int()], values[(codes & 15).int()]), dim=-1).flatten(-2)


class NF4(Format):
    """bitsandbytes' NF4 with double quantization (QLoRA, arXiv 2305.14314), bit by bit: 64 values share a scale (their
    largest magnitude), and 256 scales of the whole tensor, also across experts, share a scale of theirs.

    codes uint8 [E, N, K/2], two values a byte, the first in the HIGH half; scales uint8 [E, N, K/64]; state fp32
    [273 + ceil(E N K / 64 / 256)], bitsandbytes' quantization state: nested_quant_map [256], quant_map [16],
    nested_offset, nested_absmax. A value is quant_map[code] * (nested_quant_map[scale] * nested_absmax + offset).
    """

    name, block, dims = "nf4", NF4_BLOCK, (3, 3, 1)
    suffixes, loss, is_whole = ("codes", "absmax", "state"), 9, True

    def _stored_shapes(self, num_experts, size_out, size_in, parts, kinds, group):
        codes, scales = ((num_experts, size_out, size_in // size) for size in (2, NF4_BLOCK))
        return Shapes(codes, scales, (SCALE_SCALES.start + -(-math.prod(scales) // SCALES_PER_SCALE),))

    def pack(self, experts, shape, order="whole", mean=torch.mean, device="cpu") -> Quantized:
        """See Format."""
        shapes = self.shapes(shape, order)
        codes, scales = (torch.empty(each, dtype=torch.uint8, device=device) for each in shapes[:2])
        absmax = torch.empty(shapes.scales, dtype=torch.float32, device=device)
        for expert, weight in enumerate(experts):
            blocks = in_fp32(weight).unflatten(1, (-1, NF4_BLOCK))
            absmax[expert] = blocks.abs().amax(-1)
            codes[expert] = to_nf4(blocks, absmax[expert])
        assert shapes.state is not None
        state = torch.empty(shapes.state, dtype=torch.float32, device=device)
        quantize_scales(absmax.view(-1), scales.view(-1), state, mean(absmax.view(-1)))
        return Quantized(codes, scales, state)

    def expert(self, packed: Quantized, expert: int) -> torch.Tensor:
        """See Format."""
        return self.grid(packed, expert).dense(packed.codes[expert], packed.scales[expert])

    def grid(self, packed: Quantized, expert: int) -> Grid:
        """Make the grid of one expert: codes [rows, columns / 2], scales [rows, columns / 64]."""
        return Grid(1, NF4_BLOCK, None, partial(_absmax, packed, expert), _codes, _values, _neighbours)

    def round_expert(self, packed: Quantized, expert: int, weight_NK: torch.Tensor, uniform=None) -> Rounded:
        """See Format. Scales stay, since those of 256 blocks are stored together."""
        return self.grid(packed, expert).round(weight_NK, packed.scales[expert], packed.codes[expert], uniform)

    def check(self, name: str, packed: Quantized, first: int = 0) -> None:
        """See Format; ValueError also where the code book is not NF4's, which the kernels know."""
        super().check(name, packed, first)
        state = packed.state
        if state is None or state.is_meta:
            return
        if not torch.equal(state[VALUE_MAP].cpu(), torch.tensor(NF4_VALUES, dtype=torch.float32, device="cpu")):
            raise ValueError(f"{name}_state has other values than NF4's 16: damaged, or another format")

    def check_share(self, experts: slice, values_per_expert: int) -> None:
        """See Format: a scale of scales must not cross from one rank's experts to another's."""
        size = NF4_BLOCK * SCALES_PER_SCALE
        bounds = [bound * values_per_expert for bound in (experts.start, experts.stop)]
        if any(bound % size for bound in bounds):
            raise ValueError(
                f"nf4 quantizes the scales of {size} values together, and {experts.stop - experts.start} experts of this "
                f'weight have {bounds[1] - bounds[0]}; split the experts over fewer ranks, or use "mxfp4"'
            )

    def state_of(self, experts: slice, state: torch.Tensor, scales_per_expert: int) -> torch.Tensor:
        """Cut the state of some experts out of that of the whole weight."""
        first, end = (bound * scales_per_expert // SCALES_PER_SCALE for bound in (experts.start, experts.stop))
        return torch.cat((state[: SCALE_SCALES.start], state[SCALE_SCALES][first:end]))

    def join(self, suffix: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        """See Format."""
        if suffix != "state":
            return super().join(suffix, tensors)
        return torch.cat((tensors[0][: SCALE_SCALES.start], *(state[SCALE_SCALES] for state in tensors)))
