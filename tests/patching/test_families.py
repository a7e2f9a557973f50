"""The families compute what Transformers computes: logits, loss and every gradient."""

import pytest
import torch
import transformers
from helpers.marks import rest_pinned
from helpers.models import (
    CONFIGS,
    assert_all_close,
    batch,
    build,
    build_patched,
    loss_and_gradients,
    relative_error,
    twin,
)
from torch import nn
from transformers.activations import ACT2FN

import sonicmoe_hf
from sonicmoe_hf.layer.experts_module import IMPLEMENTATION
from sonicmoe_hf.layer.routing import TokenRounding
from sonicmoe_hf.patching.experts import UnsupportedExpertsError, experts_facts

FP32 = "fp32: two orders of summation over a few dozen terms, through two layers and back"
FAMILIES = list(CONFIGS)
EVERY_FAMILY = [*FAMILIES, "nemotron_h"]  # whose experts have no gate, and read a latent
OF_THE_HIDDEN_SIZE = pytest.param("nemotron_h", {"moe_latent_size": None}, id="nemotron_h without a latent")


@pytest.mark.parametrize("family, changes", [*((family, {}) for family in EVERY_FAMILY), OF_THE_HIDDEN_SIZE])
@pytest.mark.parametrize("how", ["interface", "patched"])
@pytest.mark.parametrize("padding", [False, True])
def test_logits_loss_and_gradients_equal_eagers(family, changes, how, padding):
    model, inputs = build(family, **changes), batch(padding=padding)
    ours = twin(model)
    if how == "interface":
        ours.set_experts_implementation(IMPLEMENTATION)
    else:
        report = sonicmoe_hf.patch_model(ours)
        assert all(layer.accelerated and layer.reason == "fully supported" for layer in report.layers)
    expected = loss_and_gradients(model, inputs)
    assert any(".experts." in name for name in expected)
    assert_all_close(loss_and_gradients(ours, inputs), expected, 1e-5, FP32)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_save_input_gives_the_same(family):
    kept, again = (
        loss_and_gradients(build_patched(family, save=save), batch()) for save in ("preactivation", "input")
    )
    assert_all_close(again, kept, 0.0, "h computed again from the same x: the same bits")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_auxiliary_loss_and_router_logits_are_still_there(family):
    if family == "deepseek_v3" and not hasattr(transformers.models.deepseek_v3.modeling_deepseek_v3, "OutputRecorder"):
        pytest.skip("this Transformers version records no router logits for DeepSeek-V3")
    model, ours, inputs = build(family), build_patched(family, TokenRounding(tile=4)), batch()
    wanted, got = (m(**inputs, output_router_logits=True) for m in (model, ours))
    assert len(got.router_logits) == len(wanted.router_logits) > 0
    first = relative_error(got.router_logits[0], wanted.router_logits[0])
    assert first < 1e-5, "the first router sees the same hidden states with and without rounding"
    if getattr(wanted, "aux_loss", None) is not None:
        assert got.aux_loss > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "rounding", rest_pinned(["nearest", "stochastic", "balanced", "nearest_score", "up", "down"], 2)
)
def test_token_rounding_changes_training_and_nothing_else(family, rounding):
    model, ours, inputs = build(family), build_patched(family, TokenRounding(rounding=rounding, tile=4)), batch()
    plain, rounded = loss_and_gradients(model, inputs), loss_and_gradients(ours, inputs)
    assert set(plain) == set(rounded) and all(t.isfinite().all() for t in rounded.values())
    assert relative_error(rounded["logits"], plain["logits"]) > 1e-3, "rounding had no effect: not a test"
    ours.eval(), model.eval()
    with torch.no_grad():
        assert relative_error(ours(**inputs).logits, model(**inputs).logits) < 1e-5, "evaluation uses top-k"
        ours.train()
        assert relative_error(ours(**inputs).logits, model(**inputs).logits) < 1e-5, "no gradients: top-k"
    assert torch.equal(loss_and_gradients(ours, inputs)["logits"], rounded["logits"]) or rounding == "stochastic"


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "deepseek_v3"])
def test_the_other_value_of_norm_topk_prob(family):
    flag = {"qwen3_moe": False, "olmoe": True, "deepseek_v3": False}[family]
    exact = TokenRounding(tile=1, min_tiles_per_expert=0)
    model, ours = build(family, norm_topk_prob=flag), build_patched(family, exact, norm_topk_prob=flag)
    assert_all_close(loss_and_gradients(ours, batch()), loss_and_gradients(model, batch()), 1e-5, FP32)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_in_bf16_is_as_near_to_fp32_as_bf16_allows(family):
    model = build(family)
    experts = next(m for m in model.modules() if hasattr(type(m), "_apply_gate"))
    half = twin(experts).to(torch.bfloat16)
    experts.config._experts_implementation = half.config._experts_implementation = "eager"
    x, index = torch.randn(96, 32), torch.stack([torch.randperm(8)[:2] for _ in range(96)])
    weights = torch.rand(96, 2)
    wanted = experts(x, index, weights)
    half.config._experts_implementation = IMPLEMENTATION
    got = half(x.bfloat16(), index, weights.bfloat16())
    assert got.dtype == torch.bfloat16
    assert relative_error(got, wanted) < 1e-2, "bf16 roundings (2^-9) of x, weights, h, a, y and out"


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_follow_a_dtype_that_changes_between_calls(family):
    plain, model = build(family), build_patched(family)
    for dtype in (torch.float32, torch.float64, torch.float32):
        found, expected = (loss_and_gradients(each.to(dtype), batch()) for each in (model, plain))
        assert found["logits"].dtype == dtype
        assert_all_close(found, expected, 1e-5, FP32)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_bf16_errs_no_more_than_eager_bf16(family):
    """Whole models in bf16 are several percent off fp32 whoever computes them; routing itself flips. So: errors."""
    ours_total = eager_total = 0.0
    for seed in range(4):
        model, inputs = build(family, seed=seed).eval(), batch(seed=seed)
        eager = twin(model).to(torch.bfloat16)
        ours = twin(eager)
        sonicmoe_hf.patch_model(ours)
        with torch.no_grad():
            wanted = model(**inputs).logits
            ours_total += relative_error(ours(**inputs).logits, wanted) ** 2
            eager_total += relative_error(eager(**inputs).logits, wanted) ** 2
    assert ours_total**0.5 <= 1.2 * eager_total**0.5, "1.2: the scatter of four seeds"


def experts_like(**changes):
    """Build a small decorated experts module, changed."""
    experts = next(m for m in build("qwen3_moe").modules() if hasattr(type(m), "_apply_gate"))
    for name, value in changes.items():
        setattr(experts, name, value)
    return experts


def test_experts_that_compute_something_else_are_refused_by_name():
    class OddGate(type(experts_like())):
        def _apply_gate(self, gate_up):
            return gate_up[..., ::2]

    odd = experts_like()
    odd.__class__ = OddGate
    for experts, reason in (
        (odd, r"OddGate: its gate .*OddGate._apply_gate is not one that sonicmoe_hf implements"),
        (experts_like(act_fn=ACT2FN["relu2"]), r"its activation ReLUSquaredActivation is not one"),
        (experts_like(has_gate=False, act_fn=nn.Mish()), r"its activation Mish .* behind .*'relu2', 'silu'"),
        (experts_like(has_post_expert_norm=True), r"end in a norm of their own"),
        (experts_like(act_fn=nn.Mish()), r"its activation Mish is not one"),
        (experts_like(is_concatenated=False), r"declared interleaved"),
    ):
        with pytest.raises(UnsupportedExpertsError, match=reason):
            experts_facts(experts)
        experts.config._experts_implementation = IMPLEMENTATION
        with pytest.raises(UnsupportedExpertsError, match=r'experts_implementation="grouped_mm"'):
            experts(torch.randn(4, 32), torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1))
