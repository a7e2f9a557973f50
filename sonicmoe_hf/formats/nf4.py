"""bitsandbytes' NF4 with double quantization: 256 scales of the whole tensor share one of theirs, also across experts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..kernels.nf4 import NF4_VALUES, SCALE_SCALES, SCALES_PER_SCALE, VALUE_MAP
from ..kernels.quantized import FORMATS, Quantized
from ..layer.holding import Holding
from ..layer.packed_weight import PackedWeight
from .format import Format, Pack

BLOCK = FORMATS["nf4"]


class NF4(Format):
    """Experts, whose state belongs to the whole weight."""

    name, parts, loss, is_whole = "nf4", ("codes", "absmax", "state"), 9, True

    def check(self, name: str, packed: Quantized, first: int = 0) -> None:
        """See Format; ValueError also where the code book is not NF4's, which the kernels know."""
        super().check(name, packed, first)
        state = packed.state
        if (
            state is not None
            and not state.is_meta
            and not torch.equal(state[VALUE_MAP].cpu(), torch.tensor(NF4_VALUES, dtype=torch.float32, device="cpu"))
        ):
            raise ValueError(f"{name}_state has other values than NF4's 16: damaged, or another format")

    def check_share(self, experts: slice, values_per_expert: int) -> None:
        """See Format: a scale of scales must not cross from one rank's experts to another's."""
        size = BLOCK * SCALES_PER_SCALE
        bounds = [bound * values_per_expert for bound in (experts.start, experts.stop)]
        if any(bound % size for bound in bounds):
            raise ValueError(
                f"nf4 quantizes the scales of {size} values together, and {experts.stop - experts.start} experts of this "
                f'weight have {bounds[1] - bounds[0]}; split the experts over fewer ranks, or use "mxfp4"'
            )

    def pack_share(self, pack: Pack, shape: torch.Size, device: torch.device, holding: Holding) -> PackedWeight:
        """See Format. The mean that scales are stored as differences from is that of all ranks' scales."""
        values = shape[1:].numel()
        self.check_share(holding.experts, values)

        def mean(absmax: torch.Tensor) -> torch.Tensor:
            of_all = absmax.new_empty(holding.size * absmax.numel())
            dist.all_gather_into_tensor(of_all, absmax.contiguous(), group=holding.group)
            return of_all.mean()

        try:
            packed = pack(mean=mean)
        except ValueError:
            mean(
                torch.full((shape[0] * values // BLOCK,), torch.nan, dtype=torch.float32, device=device)
            )  # the others wait for it
            raise
        assert packed.state is not None  # NF4 has one
        if not bool(torch.isfinite(packed.state).all()):
            raise ValueError(
                "another rank's experts have NaN or infinite values, or are missing: see that rank's error"
            )
        return packed

    def stored_share(self, tensors: list[torch.Tensor], holding: Holding) -> list[torch.Tensor]:
        """See Format. The state belongs to the whole weight, and is gathered from the pieces that ranks read of it."""
        codes, scales, piece = tensors
        scales_per_expert = scales[0].numel()
        length = SCALE_SCALES.start - (-holding.num_experts * scales_per_expert // SCALES_PER_SCALE)
        longest = -(-length // holding.size)
        pieces = piece.new_empty(holding.size * longest)
        padded = torch.nn.functional.pad(piece, (0, longest - len(piece)))
        dist.all_gather_into_tensor(pieces, padded, group=holding.group)
        bounds = holding.experts.start, holding.experts.stop
        first, end = (bound * scales_per_expert // SCALES_PER_SCALE for bound in bounds)
        whole = pieces[:length]
        return [codes, scales, torch.cat((whole[: SCALE_SCALES.start], whole[SCALE_SCALES][first:end]))]

    def join(self, part: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        """See Format."""
        if part != "state":
            return super().join(part, tensors)
        return torch.cat((tensors[0][: SCALE_SCALES.start], *(state[SCALE_SCALES] for state in tensors)))
