"""Dithered rounding to packed formats: unbiased, and none of what nothing changed."""

import pytest
import torch

from sonicmoe_hf.kernels.packed import FORMATS, Quantized
from sonicmoe_hf.kernels.packed.dither import FACTORS, Dither

E, N, K = 2, 64, 512
every_format = pytest.mark.parametrize("name", FORMATS)


def weight(seed=0):
    made = torch.randn(E, N, K, generator=torch.Generator().manual_seed(seed)) * 0.05
    made[0, 3] = 0.0
    return made


def packed_and_dense(name, order="whole"):
    packed = FORMATS[name].quantize(weight(), order)
    return packed, FORMATS[name].dequantize(packed, torch.float32)


def put(name, packed, expert, rounded):
    """Put one expert's codes and scales into the packed weight."""
    codes, scales = packed.codes.clone(), packed.scales.clone()
    codes[expert], scales[expert] = rounded.codes, rounded.scales
    return Quantized(codes, scales, packed.state)


def reference(name, seed, expert, row, column):
    """Compute the number by its formula, in Python's integers."""
    bits = 2**32 - 1

    def mix(x):
        x = (x ^ x >> 15) * FACTORS[0] & bits
        x = (x ^ x >> 12) * FACTORS[1] & bits
        return x ^ x >> 15

    key = Dither(name, seed).key
    y = (mix(row ^ mix(expert ^ key)) ^ mix(column ^ (key ^ bits))) * FACTORS[0] & bits
    return ((y ^ y >> 15) * FACTORS[1] & bits) >> 8


def test_numbers_are_those_of_the_formula_for_ever():
    """A merge is repeated to the bit by later versions and other backends, so none of this may change."""
    found = Dither("model.layers.0.mlp.experts.gate_up_proj", 7).uniform(3, (5, 4)) * 2**24
    wanted = [[reference("model.layers.0.mlp.experts.gate_up_proj", 7, 3, r, c) for c in range(4)] for r in range(5)]
    assert found.long().tolist() == wanted
    assert wanted[0] == [14403816, 8668652, 10253284, 8119133]


def test_numbers_are_uniform_and_neighbours_know_nothing_of_each_other():
    u = Dither("w").uniform(0, (1024, 1024))
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, 64, 0, 1) / u.numel() * 64
    assert (counts - 1).abs().max() < 0.035, "4.5 standard deviations of 2^14 numbers a bin"
    others = {
        "row": u.roll(1, 0),
        "column": u.roll(1, 1),
        "expert": Dither("w").uniform(1, u.shape),
        "weight": Dither("v").uniform(0, u.shape),
        "seed": Dither("w", 1).uniform(0, u.shape),
        "rectangle": u.roll(1, 0) + u.roll(1, 1) - u.roll((1, 1), (0, 1)),
    }
    for what, other in others.items():
        correlation = torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.004, (what, "4 standard deviations of 2^20 numbers")


def test_gate_and_up_have_the_same_numbers_in_every_order():
    concatenated = Dither("w", order="concatenated").uniform(1, (10, 7))
    interleaved = Dither("w", order="interleaved").uniform(1, (10, 7))
    up = Dither("w", first_row=5).uniform(1, (5, 7))
    assert torch.equal(interleaved[0::2], concatenated[:5]) and torch.equal(interleaved[1::2], concatenated[5:])
    assert torch.equal(up, concatenated[5:])


@pytest.mark.pinned
@every_format
def test_the_mean_over_seeds_is_the_value(name):
    """Changes go from a thousandth of a weight to a third, where no value grows beyond its block's largest: its scale
    stays, also where the largest shrinks."""
    packed, dense = packed_and_dense(name)
    generator, format = torch.Generator().manual_seed(1), FORMATS[name]
    exact = dense[1] + dense.std() * torch.logspace(-3, -0.5, N).unsqueeze(1) * torch.randn(N, K, generator=generator)
    rows = dense[1].abs().amax(1, keepdim=True) if name == "fp8" else None
    blocks = dense[1].view(N, -1, format.group(packed) if rows is None else K).abs().amax(-1, keepdim=True)
    largest = blocks.expand(-1, -1, K // blocks.shape[1]).reshape(N, K)
    exact = exact.clamp(-0.85 * largest, 0.85 * largest)  # INT4 reaches from -8 to 7
    seeds, total, squares = 128, torch.zeros(N, K, dtype=torch.float64), 0.0
    for seed in range(seeds):
        rounded = format.round_expert(packed, 1, exact, Dither("w", seed).uniform(1, exact.shape))
        error = rounded.values - exact
        assert torch.equal(rounded.scales, packed.scales[1])
        total += error
        squares += error.square().sum().item()
    noise = (squares / seeds / exact.numel()) ** 0.5
    bias = total.mean().item() / seeds / noise
    assert abs(bias) < 2e-3, "of the noise; as many independent numbers have a mean of 4.9e-4"
    change = (exact - dense[1]).double()
    for some in slice(0, N // 2), slice(N // 2, N):
        kept = 1 + (total[some] / seeds * change[some]).sum() / change[some].square().sum()
        assert abs(kept - 1) < 0.04, "the noise of 128 seeds, beside changes of a hundredth of a step"


@every_format
@pytest.mark.parametrize("order", ["whole", "concatenated", "interleaved"])
@pytest.mark.parametrize("rounding", ["dithered", "nearest"])
def test_what_nothing_changed_keeps_its_bits(name, order, rounding):
    packed, dense = packed_and_dense(name, order)
    if name in ("mxfp4", "nvfp4", "fp8"):  # -0, which W + 0 is not
        packed.codes[:, 5] = 0x80 if name == "fp8" else 0x88
        dense = FORMATS[name].dequantize(packed, torch.float32)
    generator, format = torch.Generator().manual_seed(1), FORMATS[name]
    change = 0.1 * dense.std() * torch.randn(E, N, K, generator=generator)
    change[:, 1::2], change[1] = 0.0, 0.0
    exact = dense + change
    for expert in range(E):
        uniform = Dither("w", order=order).uniform(expert, (N, K)) if rounding == "dithered" else None
        rounded = format.round_expert(packed, expert, exact[expert], uniform)
        made = put(name, packed, expert, rounded)
        assert torch.equal(rounded.values, format.dequantize(made, torch.float32)[expert]), "codes and scales say it"
        kept = slice(None) if expert else slice(1, None, 2)
        assert torch.equal(rounded.codes[kept], packed.codes[expert][kept])
        assert torch.equal(rounded.values[kept], dense[expert][kept])
        assert expert or not torch.equal(rounded.codes, packed.codes[0])
    assert torch.equal(rounded.scales, packed.scales[1])


@pytest.mark.parametrize("name", ["mxfp4", "fp8", "nvfp4"])
def test_the_order_of_gates_and_ups_does_not_change_a_value(name):
    rows = torch.arange(N).view(2, -1).T.flatten()  # of concatenated ones, as they stand interleaved
    whole, change = weight()[0], 0.01 * weight(1)[0]
    found = []
    for order, own in ("concatenated", torch.arange(N)), ("interleaved", rows):
        packed = FORMATS[name].quantize(whole[own][None], order)
        exact = FORMATS[name].dequantize(packed, torch.float32)[0] + change[own]
        uniform = Dither("w", order=order).uniform(0, exact.shape)
        found.append(FORMATS[name].round_expert(packed, 0, exact, uniform).values)
    assert torch.equal(found[0][rows], found[1])


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8"])
def test_a_block_that_outgrows_its_scale_takes_a_new_one(name):
    packed, dense = packed_and_dense(name)
    grown = dense[1].clone()
    grown[:, :128] = 0.095 * weight(1)[1, :, :128] / 0.05
    format = FORMATS[name]
    rounded = format.round_expert(packed, 1, grown, Dither("w").uniform(1, grown.shape))
    near, far = slice(128), slice(128, None)
    error = (rounded.values - grown)[:, near].norm() / grown[:, near].norm()
    assert error < 1.5 * format.loss / 100, "sqrt(2) of nearest's"
    assert not torch.equal(rounded.scales, packed.scales[1])
    assert torch.equal(rounded.values[:, far], dense[1][:, far])
