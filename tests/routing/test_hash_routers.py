"""DeepSeek-V4's first layers take the experts of a token from a table: what replay, counting, rounding and balancing do."""

import pytest
import torch
from helpers.models import batch, loss_and_gradients, relative_error, with_realistic_weights
from helpers.small_families import small_config
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import sonicmoe_hf
from sonicmoe_hf import LoadBalancing, TokenRounding, record_routing, replay_routing
from sonicmoe_hf.patching.support import find_layers
from sonicmoe_hf.routing.model import clear_counts, router_hooks, routing_state

E = 8
ROUNDING = TokenRounding(tile=16, min_tiles_per_expert=0)


def model_of(*kinds):
    """Return a patched model of layers of these kinds, the first's table drawn at random."""
    torch.manual_seed(0)
    config = small_config(CONFIG_MAPPING["deepseek_v4"], {"mlp_layer_types": list(kinds)})
    model = with_realistic_weights(AutoModelForCausalLM.from_config(config))
    ids = torch.rand(config.vocab_size, E).topk(config.num_experts_per_tok).indices
    model.model.layers[0].mlp.gate.tid2eid.copy_(ids)
    sonicmoe_hf.patch_model(model)
    return model


@pytest.fixture
def model():
    return model_of("hash_moe", "moe")


def of_table(model, inputs):
    return model.model.layers[0].mlp.gate.tid2eid[inputs["input_ids"].flatten()]


def test_recording_names_the_tables_experts_and_a_replay_takes_what_it_is_given(model):
    inputs = batch()
    plain = loss_and_gradients(model, inputs)
    with record_routing(model) as routing:
        loss_and_gradients(model, inputs)
    assert torch.equal(routing.tensors()[0][0], of_table(model, inputs).int())
    with replay_routing(model, routing):
        again = loss_and_gradients(model, inputs)
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    others = (routing.tensors()[0] + 1) % E
    with replay_routing(model, others), record_routing(model) as used:
        loss_and_gradients(model, inputs)
    assert torch.equal(used.tensors()[0], others)


def test_the_load_of_both_layers_is_counted(model):
    inputs = batch()
    clear_counts(model)
    routing_state(model).counting = True
    loss_and_gradients(model, inputs)
    rows_E = [hook.load.rows_E for hook in router_hooks(model)]
    assert torch.equal(rows_E[0], F.one_hot(of_table(model, inputs), E).sum((0, 1)))
    assert [rows.sum() for rows in rows_E] == [of_table(model, inputs).numel()] * 2


def test_token_rounding_leaves_the_tables_layers_as_they_are_and_rounds_the_others(model):
    inputs = batch()
    clear_counts(model)
    routing_state(model).counting = True
    sonicmoe_hf.set_routing(model, ROUNDING)
    found = loss_and_gradients(model, inputs)
    fixed_E, rounded_E = [hook.load.rows_E for hook in router_hooks(model)]
    assert torch.equal(fixed_E, F.one_hot(of_table(model, inputs), E).sum((0, 1)))
    assert (fixed_E % ROUNDING.tile).any() and not (rounded_E % ROUNDING.tile).any()
    assert found["loss"].isfinite()


def test_balancing_moves_scores_and_biases_of_the_other_layers_alone(model):
    inputs, routers = batch(), [layer.router for layer in find_layers(model)]
    plain = loss_and_gradients(model, inputs)
    before = routers[1].e_score_correction_bias.clone()
    balancing = LoadBalancing(per_layer_loss=10.0, bias_update=1e-3)
    balancing.start(model)
    found = loss_and_gradients(model, inputs)
    balancing.step(model)
    assert not torch.equal(routers[1].e_score_correction_bias, before)
    name = "model.layers.1.mlp.gate.weight"
    assert relative_error(found[name], plain[name]) > 0.1


def test_a_table_alone_is_no_reason_for_a_balancing_loss():
    inputs, model = batch(), model_of("hash_moe", "hash_moe")
    plain = loss_and_gradients(model, inputs)
    LoadBalancing(per_layer_loss=10.0, bias_update=1e-3).start(model)
    found = loss_and_gradients(model, inputs)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
