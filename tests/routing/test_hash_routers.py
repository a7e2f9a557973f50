"""DeepSeek-V4's first layers take the experts of a token from a table: what replay, counting,
rounding and balancing do."""

import pytest
import torch
from helpers.models import batch, loss_and_gradients, relative_error, with_realistic_weights
from helpers.resuming import assert_equal, rounding, train_and_save, weights
from helpers.small_families import small_config
from helpers.training import CHECKPOINTING, start_counting
from peft import get_peft_model
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import sonicmoe_hf
from sonicmoe_hf import (
    LoadBalancing,
    RecordedRouting,
    TokenRounding,
    record_routing,
    replay_routing,
    serving_divergence,
)
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.routing.patched_model import clear_counts, router_hooks, routing_state

E = 8
ROUNDING = TokenRounding(tile=16, min_tiles_per_expert=0)


def model_of(*kinds):
    """Make a patched model of layers of these kinds, the first's table drawn at random."""
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
    routing_state(model).counts_load = True
    loss_and_gradients(model, inputs)
    rows_E = [hook.load.pairs_E for hook in router_hooks(model)]
    assert torch.equal(rows_E[0], F.one_hot(of_table(model, inputs), E).sum((0, 1)))
    assert [rows.sum() for rows in rows_E] == [of_table(model, inputs).numel()] * 2


def test_token_rounding_leaves_the_tables_layers_as_they_are_and_rounds_the_others(model):
    inputs = batch()
    clear_counts(model)
    routing_state(model).counts_load = True
    sonicmoe_hf.set_routing(model, ROUNDING)
    found = loss_and_gradients(model, inputs)
    fixed_E, rounded_E = [hook.load.pairs_E for hook in router_hooks(model)]
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


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_checkpointing_records_replays_and_counts_a_tables_layer_once(kind, model):
    inputs = batch(padding=True)
    others = torch.randint(E, (2, inputs["input_ids"].numel(), 2), generator=torch.manual_seed(3))

    def passes():
        with record_routing(model) as own:
            found = [loss_and_gradients(model, inputs)]
        with replay_routing(model, others):
            found.append(loss_and_gradients(model, inputs))
        start_counting(model)
        loss_and_gradients(model, inputs)
        routing_state(model).counts_load = False
        return found, own.tensors()[0], [hook.load.counted.tolist() for hook in router_hooks(model)]

    plain, recorded, counts = passes()
    model.gradient_checkpointing_enable(CHECKPOINTING[kind])
    model.enable_input_require_grads()
    again, recorded_again, counts_again = passes()
    for found, expected in zip(again, plain):
        assert_equal(found, expected)
    assert torch.equal(recorded_again, recorded) and counts_again == counts
    assert sum(counts[0][:E]) == 2 * inputs["attention_mask"].sum()


def test_what_a_server_recorded_is_replayed_in_any_order_and_a_wrong_order_shows_in_the_table(model):
    """In reinforcement learning a server computes each sequence alone, and a batch of them is padded left and
    shuffled. fp32, sums over other blocks of keys: 1e-5."""
    model.eval()
    lengths, ids = [9, 14, 11, 14], batch()["input_ids"][:, :14].clone()
    mask = torch.stack([torch.arange(14) >= 14 - length for length in lengths]).long()
    completions, alone = [], []
    for row, length in enumerate(lengths):
        with torch.no_grad(), record_routing(model) as routing:
            alone.append(model(ids[row, -length:][None], use_cache=False).logits[0])
        completions.append(routing.tensors()[0].transpose(0, 1)[:-1].numpy())
    order = [2, 0, 3, 1]
    inputs = {"input_ids": ids[order], "attention_mask": mask[order], "use_cache": False}
    recorded = RecordedRouting.from_server([completions[row] for row in order], mask[order])
    assert set(serving_divergence(model, recorded, **inputs).values()) == {0.0}
    with torch.no_grad(), replay_routing(model, recorded):
        logits = model(**inputs).logits
    for found, row in zip(logits, order):
        assert relative_error(found[-lengths[row] :], alone[row]) < 1e-5
    wrong = recorded.tensors()[0].view(2, 4, 14, 2)[:, [0, 1, 3, 2]].flatten(1, 2)
    assert serving_divergence(model, wrong, **inputs)["model.layers.0.mlp"] > 0.2


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "LoRA with the routers"])
def test_a_resumed_run_rounds_balances_and_counts_beside_a_table_as_one_without_a_break(adapted, tmp_path):
    def run(checkpoint=None):
        model = model_of("hash_moe", "moe")
        if adapted:
            torch.manual_seed(1)
            config = sonicmoe_hf.lora_config(model, 2)
            config.modules_to_save = ["gate"]
            model = get_peft_model(model, config)
        balancing = LoadBalancing(per_layer_loss=0.05, bias_update=1e-2)
        trainer = train_and_save(model, tmp_path, checkpoint, [rounding(), balancing])
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return weights(model) | buffers, [log for log in trainer.state.log_history if "moe/rows_added" in log]

    whole, logs = run()
    again, logs_again = run(str(tmp_path / "checkpoint-2"))
    assert_equal(again, whole)
    metrics = [name for name in logs[-1] if name.startswith("moe/")]
    assert metrics and all(logs_again[-1][name] == logs[-1][name] for name in metrics)
    name = next(name for name in whole if "0.mlp.gate" in name and name.endswith("tid2eid"))
    assert torch.equal(whole[name], model_of("hash_moe", "moe").model.layers[0].mlp.gate.tid2eid)


def test_reports_name_the_layers_that_rounding_leaves_as_they_are(model):
    assert not sonicmoe_hf.routing.why_no_rounding(model)
    fixed, rounded = sonicmoe_hf.patch_model(model, ROUNDING).layers
    assert fixed.accelerated and "from a table, which token rounding and balancing leave as they are" in fixed.reason
    assert rounded.reason == "fully supported"


def test_no_bias_is_counted_for_a_table(model):
    """A count would be reset by nothing, and compiled layers take no counter that begins in them."""
    LoadBalancing(bias_update=1e-3).start(model)
    loss_and_gradients(model, batch())
    fixed, counted = (hook.bias_load.pairs_E for hook in router_hooks(model))
    assert fixed is None and counted.sum() > 0
