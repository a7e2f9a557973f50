"""FP8 products beside the same arithmetic in PyTorch, and how far roundings alone may bring them apart."""

from __future__ import annotations

import torch

from benchmarks.common.shapes import activated
from sonicmoe_hf.kernels import eager, hopper
from sonicmoe_hf.kernels.interface import Activation, LoraTerm, PackedOperand
from sonicmoe_hf.kernels.scaled import SMALLEST_GRADIENT, ScaledRows, ScaledWeight, scale_halves, transposed
from sonicmoe_hf.layer.moe_experts import LowRank, moe_experts
from sonicmoe_hf.tools.comparing import relative_error

BF16 = torch.bfloat16
SWIGLU = Activation()


def adapters_of(widths, rank, num_rows, num_experts, sizes, device):
    """Make LoraTerms for products of these widths, whose rows and factors are of these sizes, or None."""
    if not rank:
        return None, None
    of_rows, of_factors = sizes
    return [
        LoraTerm(
            (of_rows * torch.randn(num_rows, rank, device=device)).bfloat16(),
            (of_factors * torch.randn(num_experts, width, rank, device=device)).bfloat16(),
        )
        for width in widths
    ]


def step_of(x, weights, routing, rank, std_of_b, scale, dout, save):
    """Make a function of a backend and of `compute`: out of a layer with adapters of this rank, or none, and the
    gradients of x, of the routing weights and of the adapters."""
    leaves, adapters = [x, routing[1]], {}
    for name, weight in zip(("gate_up_adapter", "down_adapter"), weights if rank else ()):
        num_experts, size_out, size_in = weight.shape
        a = (torch.randn(num_experts, rank, size_in, device=x.device) * size_in**-0.5).requires_grad_()
        b = (torch.randn(num_experts, size_out, rank, device=x.device) * std_of_b).requires_grad_()
        adapters[name] = LowRank(a, b, scale)
        leaves += [a, b]

    def step(backend, compute="fp8"):
        out = moe_experts(x, *weights, routing, save=save, compute=compute, backend=backend, **adapters)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    return step


def check(
    x: ScaledRows, gate_up: PackedOperand, down: PackedOperand, rows, adapters=(None, None), kernels=hopper
) -> dict[str, float]:
    """Compare up and down with the same arithmetic in PyTorch; assert that their errors are no more than roundings
    are.

    h and y are rounded to bf16, and the tensor cores add the values of a group with fewer bits than fp32: half as much
    again. a: what e4m3 loses, and h's rounding, which e4m3 hides.
    """
    h, whole_a, a = kernels.scaled_up(x, gate_up, rows, SWIGLU, BF16, True, True, True, adapters[0])
    y = kernels.scaled_down(a, down, rows, BF16, adapters[1])
    alone, *nothing = kernels.scaled_up(x, gate_up, rows, SWIGLU, BF16, True, False, False, adapters[0])
    num_rows = int(rows.offsets[-1])
    h_exact, *_ = eager.scaled_up(x, gate_up, rows, SWIGLU, torch.float32, True, False, False, adapters[0])
    y_exact = eager.scaled_down(a, down, rows, torch.float32, adapters[1])[:num_rows]
    h, whole_a, y, alone, h_exact = (tensor[:num_rows] for tensor in (h, whole_a, y, alone, h_exact))
    a, a_exact = ScaledRows(*(part[:num_rows] for part in a)), activated(h.float(), "swiglu")
    assert torch.equal(alone, h) and nothing == [None, None]
    found = {"h": (h, h_exact), "whole a": (whole_a, a_exact), "a": (a.values(), a_exact), "y": (y, y_exact)}
    errors = {name: relative_error(*pair) for name, pair in found.items()}
    for name, (_, exact) in found.items():
        rounded = eager.scale_rows(exact).values() if name == "a" else exact.bfloat16()
        bound = (1.02 if name == "a" else 1.5) * relative_error(rounded, exact)
        assert errors[name] <= bound, f"{name} is off by {errors[name]:.3g}, more than {bound:.3g}"
    return errors


def check_backward(
    dout: ScaledRows, gate_up: ScaledWeight, down: ScaledWeight, h, routed, rows, adapters=(None, None), kernels=hopper
):
    """Run `check` of the products of backward, of transposed weights; adapters: of down, of gate_up.

    da' is rounded to bf16 beside what is stored, which makes twice its rounding at most. dh in FP8 is dh in bf16 scaled,
    up to a division that rounds otherwise: of bf16's few values many lie on the edge between two codes.
    """
    dh, a, dw, dh8 = kernels.scaled_down_backward(
        dout, down, h, routed, rows, SWIGLU, True, True, True, True, adapters[0]
    )
    dx = kernels.scaled_down(dh8, gate_up, rows, BF16, adapters[1])
    *nothing, alone_dw, alone = kernels.scaled_down_backward(
        dout, down, h, routed, rows, SWIGLU, False, False, True, True, adapters[0]
    )
    num_rows, kept = int(rows.offsets[-1]), rows.pair[: int(rows.offsets[-1])].long()
    exact = eager.scaled_down_backward(
        dout, down, h.float(), routed, rows, SWIGLU, True, True, True, False, adapters[0]
    )
    dx_exact = eager.scaled_down(dh8, gate_up, rows, torch.float32, adapters[1])
    dh, a, dh8, alone, dx = (
        ScaledRows(*(part[:num_rows] for part in one)) if isinstance(one, ScaledRows) else one[:num_rows]
        for one in (dh, a, dh8, alone, dx)
    )
    assert nothing == [None, None]
    # another kernel, in which ptxas may contract other multiplications and additions
    assert relative_error(alone.values(), dh8.values()) < 5e-3 and relative_error(alone_dw, dw) < 1e-5
    assert dw.count_nonzero() <= num_rows, "a dropped pair has a gradient"
    found = {"dh": (dh, exact[0]), "a'": (a, exact[1]), "dx": (dx, dx_exact), "dw": (dw[kept], exact[2][kept])}
    found = {name: (one, whole if name == "dw" else whole[:num_rows]) for name, (one, whole) in found.items()}
    errors = {name: relative_error(*pair) for name, pair in found.items()}
    errors["dh in FP8"] = relative_error(dh8.values(), scale_halves(dh).values())
    for name, error in errors.items():
        bound = 5e-3 if name == "dh in FP8" else 2 * relative_error(found[name][1].bfloat16(), found[name][1])
        assert error <= bound, f"{name} is off by {error:.3g}, more than {bound:.3g}"
    return errors


def gradients_of(shape):
    """Draw dout, as small as gradients are, h and the pairs' routing weights."""
    generator = torch.Generator("cuda").manual_seed(1)
    dout = 1e-9 * torch.randn(shape.T, shape.H, generator=generator, device="cuda", dtype=BF16)
    h = torch.randn(shape.T * shape.K, 2 * shape.I, generator=generator, device="cuda", dtype=BF16)
    return dout, h, torch.rand(shape.T * shape.K, generator=generator, device="cuda")


def check_gradients(shape, gate_up, down, rows, adapters=(None, None), kernels=hopper):
    """Run `check_backward`, repeated, and what comes before it."""
    dout, h, routed = gradients_of(shape)
    weights = [transposed(*packed[:2]) for packed in (gate_up, down)]
    for packed, expected in zip((gate_up, down), weights):
        assert all(map(torch.equal, hopper.transposed(packed.codes, packed.scales), expected)), "bit by bit"
    scaled_dout = hopper.scale_rows(dout, SMALLEST_GRADIENT)
    difference = relative_error(scaled_dout.values(), eager.scale_rows(dout, SMALLEST_GRADIENT).values())
    assert difference <= 2e-3, "a division may round otherwise"
    errors = check_backward(scaled_dout, *weights, h, routed, rows, adapters, kernels)
    for _ in range(3):
        again = check_backward(scaled_dout, *weights, h, routed, rows, adapters, kernels)
        assert again == errors, "another result the second time"
    return errors
