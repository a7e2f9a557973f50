"""Nemotron-H: experts without a gate, of a latent size, behind DeepSeek-V3's router. The whole model is beside Transformers'
own: logits, loss and every gradient; with adapters, packed, rounded and balanced."""

import json
import shutil

import peft
import pytest
import torch
from helpers.adapters import fused, random_factors
from helpers.checkpoints import tensors_in
from helpers.models import ORDER_OF_SUMS, assert_all_close, batch, build, loss_and_gradients, patched, twin
from helpers.training import POLICY, Watch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import sonicmoe_hf
from sonicmoe_hf import CheckpointError, LoadBalancing, PackedWeight, TokenRounding
from sonicmoe_hf.kernels.quantized import FORMATS, parts_and_kinds
from sonicmoe_hf.layer.experts_module import IMPLEMENTATION
from sonicmoe_hf.patching.experts import experts_facts
from sonicmoe_hf.patching.support import find_layers

TOLERANCE = 1e-5
SIZES = pytest.mark.parametrize("latent", [24, None], ids=["latent", "of the hidden size"])


@SIZES
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_logits_loss_and_gradients_equal_eagers(latent, padding, save):
    model, inputs = build("nemotron_h", moe_latent_size=latent), batch(padding=padding)
    ours = twin(model)
    report = sonicmoe_hf.patch_model(ours, save=save)
    assert len(report.layers) == 2 and all(layer.accelerated and layer.token_rounding for layer in report.layers)
    expected = loss_and_gradients(model, inputs)
    assert sum(".mixer.experts.up_proj" in name for name in expected) == 2
    assert_all_close(loss_and_gradients(ours, inputs), expected, TOLERANCE, ORDER_OF_SUMS)


@pytest.mark.parametrize("act", ["relu2", "relu", "gelu", "silu"])
def test_its_other_activations_are_told_from_the_module(act):
    model = build("nemotron_h", mlp_hidden_act=act)
    ours = twin(model)
    ours.set_experts_implementation(IMPLEMENTATION)
    assert {experts_facts(layer.experts).activation.name for layer in find_layers(ours)} == {act}
    expected = loss_and_gradients(model, batch())
    assert_all_close(loss_and_gradients(ours, batch()), expected, TOLERANCE, ORDER_OF_SUMS)


def test_tokens_are_rounded_by_its_routers_formula():
    """A tile of one row rounds nothing: the routing made from scores is the router's own."""
    model, inputs = build("nemotron_h"), batch()
    expected = loss_and_gradients(model, inputs)
    sonicmoe_hf.patch_model(model, TokenRounding(tile=1, min_tiles_per_expert=0))
    watch = Watch(model)
    assert_all_close(loss_and_gradients(model, inputs), expected, TOLERANCE, ORDER_OF_SUMS)
    sonicmoe_hf.set_routing(model, POLICY)
    found = loss_and_gradients(model, inputs)
    assert (found["logits"] - expected["logits"]).abs().max() > 1e-2, "rounding had no effect"
    routings = [routing for _, routing in watch.calls]
    assert len(routings) == 4 and all(routing is not None for routing in routings)
    for routing in routings[2:]:
        index = routing.expert_index.flatten()
        assert (torch.bincount(index[index < 8], minlength=8) % POLICY.tile == 0).all()


def test_balancing_evens_out_its_experts():
    model, inputs = build("nemotron_h", n_group=1, topk_group=1), batch(rows=8)
    routers = [layer.router for layer in find_layers(model)]
    with torch.no_grad():
        for router in routers:
            router.e_score_correction_bias.copy_(torch.linspace(0, 0.5, 8))
    sonicmoe_hf.patch_model(model)
    balancing, loads, indices = LoadBalancing(bias_update=1e-2), [], []
    handle = routers[0].register_forward_hook(lambda module, args, out: indices.append(out[2]))
    balancing.start(model)
    for _ in range(40):
        model(**inputs)
        counts = torch.bincount(indices.pop().flatten(), minlength=8).float()
        loads.append((counts.max() / counts.mean()).item())
        balancing.step(model)
    handle.remove()
    assert loads[0] > 2 and loads[-1] < 1.3


@pytest.fixture(scope="module")
def hub_and_adapter(tmp_path_factory):
    """A checkpoint, and an adapter on its experts as PEFT saves it."""
    folder = tmp_path_factory.mktemp("nemotron_h")
    model = build("nemotron_h")
    model.save_pretrained(folder / "hub")
    sonicmoe_hf.patch_model(model)
    random_factors(peft.get_peft_model(model, sonicmoe_hf.lora_config(model, r=3))).save_pretrained(folder / "adapter")
    return folder / "hub", folder / "adapter"


def test_its_adapters_have_no_native_layout(hub_and_adapter, tmp_path):
    hub, adapter = hub_and_adapter
    with pytest.raises(CheckpointError, match="model_type is 'nemotron_h'; conversion knows"):
        sonicmoe_hf.convert_adapter(adapter, tmp_path / "converted", "native", trained_on=hub)
    assert not (tmp_path / "converted").exists()


def test_factors_of_a_single_expert_change_it_alone(hub_and_adapter, tmp_path):
    hub, adapter = hub_and_adapter
    shutil.copytree(adapter, tmp_path / "single")
    name = "base_model.model.model.layers.1.mixer.experts.0.up_proj.lora_{}.weight"
    factors = {name.format("A"): torch.ones(3, 24), name.format("B"): torch.ones(16, 3)}
    save_file(factors, tmp_path / "single" / "adapter_model.safetensors")
    sonicmoe_hf.merge_adapter(hub, tmp_path / "single", tmp_path / "merged")
    before, after = tensors_in(hub), tensors_in(tmp_path / "merged")
    (changed,) = (name for name in before if not torch.equal(before[name], after[name]))
    assert changed.endswith("layers.1.mixer.experts.0.up_proj.weight")
    alpha = json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"]
    assert_all_close(
        {"w": after[changed] - before[changed]}, {"w": torch.full((16, 24), float(alpha))}, 1e-6, "B A is r"
    )


def test_its_adapters_are_merged_as_peft_does(hub_and_adapter, tmp_path):
    hub, adapter = hub_and_adapter
    sonicmoe_hf.merge_adapter(hub, adapter, tmp_path / "merged")
    with pytest.raises(CheckpointError, match=r"model_type is 'nemotron_h'; conversion knows .* without --layout"):
        sonicmoe_hf.merge_adapter(hub, adapter, tmp_path / "native", "native")
    model = peft.PeftModel.from_pretrained(sonicmoe_hf.from_pretrained(hub, dtype=torch.float32), adapter)
    with torch.no_grad():
        expected = {"logits": model(**batch()).logits}
        assert_all_close({"logits": model.merge_and_unload()(**batch()).logits}, expected, TOLERANCE, ORDER_OF_SUMS)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert_all_close({"logits": merged(**batch()).logits}, expected, TOLERANCE, ORDER_OF_SUMS)


def test_its_adapters_are_those_that_peft_computes():
    """Against PEFT's own W + BA through Transformers' grouped products."""
    model = build("nemotron_h")
    patched = twin(model)
    sonicmoe_hf.patch_model(patched)
    config = sonicmoe_hf.lora_config(patched, r=3, target_modules=[])
    assert sorted(config.target_parameters) == ["experts.down_proj", "experts.up_proj"]
    ours = random_factors(peft.get_peft_model(patched, config))
    model.set_experts_implementation("grouped_mm")
    theirs = random_factors(peft.get_peft_model(model, config))
    expected = loss_and_gradients(theirs, batch())
    assert len(expected) == 2 + 2 * 4
    with fused():
        found = loss_and_gradients(ours, batch())
    assert_all_close(found, expected, TOLERANCE, ORDER_OF_SUMS)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_experts_compute_what_their_values_do_and_are_saved(name, tmp_path):
    build("nemotron_h", moe_latent_size=64, moe_intermediate_size=64).save_pretrained(tmp_path / "hub")
    model = sonicmoe_hf.from_pretrained(tmp_path / "hub", experts_quantization=name, dtype=torch.float32)
    weights = {key: w for key, w in model.named_parameters() if isinstance(w, PackedWeight)}
    assert {key.rpartition(".")[2] for key in weights} == {"up_proj", "down_proj"} and len(weights) == 4
    assert {parts_and_kinds(weight.packed, name) for weight in weights.values()} == {(1, 1)}  # of no gate and no up
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.float32)
    with torch.no_grad():
        for key, weight in weights.items():
            dense.get_parameter(key).copy_(weight.dequantize())
        expected = dense(**batch()).logits
        assert_all_close({"logits": model(**batch()).logits}, {"logits": expected}, TOLERANCE, ORDER_OF_SUMS)
    model.save_pretrained(tmp_path / "packed")
    again = sonicmoe_hf.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert sum(isinstance(weight, PackedWeight) for weight in again.parameters()) == 4
    with torch.no_grad():
        assert torch.equal(again(**batch()).logits, model(**batch()).logits)


def test_it_compiles_without_a_graph_break():
    torch._dynamo.reset()
    model = patched("nemotron_h")
    block = next(find_layers(model)).block
    x = torch.randn(2, 16, 32)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_all_close({"out": compiled(x)}, {"out": block(x)}, TOLERANCE, ORDER_OF_SUMS)


def test_it_has_no_native_layout(tmp_path):
    build("nemotron_h").save_pretrained(tmp_path / "hub")
    with pytest.raises(CheckpointError, match=r"conversion knows qwen3_moe, .* Load other checkpoints as they are"):
        sonicmoe_hf.convert_checkpoint(tmp_path / "hub", tmp_path / "native", layout="native")
    assert not (tmp_path / "native").exists()
