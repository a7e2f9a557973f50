"""Hooks of experts under PEFT's LoRA: they get what Transformers' experts get, and what they change counts."""

import itertools

import pytest
import torch
from helpers.adapters import build_one_layer, gradients_without_merging, patch, train_router_and_embedding, with_lora
from helpers.models import ORDER_OF_SUMS, assert_all_close, batch, loss_and_gradients, relative_error
from helpers.training import CHECKPOINTING, checkpoint_layers
from peft.tuners.lora.layer import ParamWrapper

from sonicmoe_hf.patching.moe_layers import find_layers


class Steering:
    """Hooks of experts and of PEFT's inner wrapper that note what they get, and change it."""

    def __init__(self, model):
        self.got = []
        wrapper = next(module for module in model.modules() if isinstance(module, ParamWrapper))
        wrapper.base_layer.register_forward_pre_hook(self.note)
        experts = wrapper.get_base_layer()
        experts.register_forward_pre_hook(self.before)
        experts.register_forward_pre_hook(self.with_keywords, with_kwargs=True)
        experts.register_forward_hook(self.after)

    def note(self, module, args):
        self.got.append([one.clone() for one in args])

    def before(self, experts, args):
        self.note(experts, args)
        x, top_k_index, top_k_weights = args
        return 1.5 * x, (top_k_index + 1) % experts.num_experts, top_k_weights.flip(-1)

    def with_keywords(self, experts, args, kwargs):
        return (0.5 * args[0], *args[1:]), kwargs

    def after(self, experts, args, output):
        self.note(experts, (*args, output))
        return 2 * output


@pytest.mark.parametrize("kind", [None, *CHECKPOINTING])
def test_hooks_of_experts_see_what_transformers_experts_get_and_what_they_change_counts(kind):
    results, steering = [], []
    for prepare in (lambda model: model, patch):
        model = train_router_and_embedding(with_lora(prepare(build_one_layer("qwen3_moe"))))
        steering.append(Steering(model))
        results.append(loss_and_gradients(checkpoint_layers(model, kind), batch()))
    assert_all_close(results[1], results[0], 1e-5, ORDER_OF_SUMS)
    theirs, ours = (one.got for one in steering)
    assert min(len(ours), len(theirs)) >= (3 if kind is None else 5), "torch ends recomputation early"
    for one, other in zip(itertools.chain(*ours), itertools.chain(*theirs)):
        assert one.dtype == other.dtype and relative_error(one.double(), other.double()) < 1e-5, ORDER_OF_SUMS


@pytest.mark.slow
def test_compiled_whole_it_gives_the_same_with_hooks_of_the_experts():
    torch._dynamo.reset()
    model = with_lora(patch(build_one_layer("qwen3_moe")))
    Steering(model)
    expected = gradients_without_merging(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_all_close(gradients_without_merging(compiled), expected, 1e-5, ORDER_OF_SUMS)


def test_a_hook_that_takes_the_adapters_away_is_told_so():
    model = with_lora(patch(build_one_layer("qwen3_moe")))
    experts = next(find_layers(model)).experts
    handle = experts.register_forward_pre_hook(lambda experts, args, kwargs: (args, {}), with_kwargs=True)
    with pytest.raises(RuntimeError, match="have it return the keyword arguments"):
        model(**batch())
    handle.remove()
    model(**batch())
