"""Messages of compiled layers and of the advice on a waiting GPU: each is raised, and then what it names is done."""

import functools
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers.models import batch, build_patched, logits_of
from helpers.said import says, silent
from helpers.training import advise, logs_of, trainer_for

import sonicmoe_hf
from sonicmoe_hf.compiling import compiled_module, layers
from sonicmoe_hf.patching.guard import guard_of
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.trainer.gpu_advice import GpuAdvice
from sonicmoe_hf.trainer.lengths import VaryingLengths
from sonicmoe_hf.trainer.packed_steps import PackedSteps

pytestmark = pytest.mark.pinned
ONE = {"num_hidden_layers": 1, "use_cache": False}
EXACT = 1e-5  # fp32: sums in another order
LEFT = "torch.compile left "


def compiled(model):
    torch._dynamo.reset()
    sonicmoe_hf.compile_layers(model, backend="eager")
    return model


@torch.compiler.disable
def kernel_of_liger_kernel():
    """Stand for one that is not traced."""


class OnHost(torch.autograd.graph.save_on_cpu):
    """Stand for the class by which Transformers offloads, without pinned memory, which takes a GPU."""

    def __init__(self, **options):
        super().__init__()


def test_what_torch_left_to_python_is_compiled_without_its_causes(monkeypatch):
    monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", OnHost)
    model = build_patched("qwen3_moe", **ONE)
    expected = model(**batch()).loss.item()
    model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)
    with says(LEFT, "train with gradient checkpointing that offloads nothing"):
        compiled(model)(**batch())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    block, norm = model.model.layers[0].mlp, model.model.layers[0].input_layernorm
    hooks = [block.register_full_backward_hook(lambda *_: None)]
    hooks.append(norm.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break("of a test")))
    model.gradient_checkpointing_disable()  # at which the first of several causes is all that torch says
    hooks.append(block.gate.register_forward_pre_hook(lambda *_: kernel_of_liger_kernel()))
    remedies = "train without output_hidden_states", "remove the module's hook", "take that out of the layer"
    with says(LEFT, *remedies, "switch that kernel off in liger_kernel_config"):
        compiled(model)(**batch(), output_hidden_states=True)
    lengths, args = VaryingLengths(), SimpleNamespace(gradient_accumulation_steps=1)
    lengths.is_compiled = True
    assert "remove the module's hook" in GpuAdvice(lengths, PackedSteps())._switches(args, model), (
        "the advice on a GPU names it, too"
    )
    for hook in hooks:
        hook.remove()
    monkeypatch.setattr(compiled_module, "RECORDS", False)  # as with torch 2.11
    with says("leave the auxiliary loss out", "else model.config.output_router_logits = False"):
        compiled(model)(**batch(), output_router_logits=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with silent("ompile"):
        loss = compiled(model)(**batch()).loss
    assert loss.item() == pytest.approx(expected, rel=EXACT) and not layers.why_in_python(model)


def collated(lengths):
    """Make a collator that gives each micro-batch the next length."""
    lengths = iter(lengths)

    def collate(rows):
        length = next(lengths)
        return {name: torch.stack([row[name] for row in rows])[:, :length] for name in rows[0]}

    return collate


SWITCHES = {
    "attach(trainer, packed_tokens=8192), which computes the micro-batches of a step as one row": (
        {"max_steps": 1, "gradient_accumulation_steps": 2},
        {},
        {"packed_tokens": 8192},
    ),
    "attach(trainer, few_lengths=True), by which sizes come again": ({"max_steps": 2}, {}, {"few_lengths": True}),
    "torch_compile_mode='reduce-overhead', which captures each layer": (
        {"max_steps": 1, "torch_compile": True, "torch_compile_backend": "eager"},
        {"torch_compile_mode": "reduce-overhead"},
        {},
    ),
}


def test_experts_whose_forward_was_replaced_under_compilation_are_patched_again(monkeypatch):
    model = build_patched("qwen3_moe", **ONE)
    expected, experts = logits_of(model), next(find_layers(model)).experts
    forward = experts.forward
    experts.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    words = "another forward took the place of these experts' own: call sonicmoe_hf.patch_model(model) again"
    for context in (says, silent):
        with monkeypatch.context() as patch, context(words):
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            guard_of(model)(model, (), {})
        sonicmoe_hf.patch_model(model)
    assert torch.equal(logits_of(model), expected)


@pytest.mark.parametrize("words", SWITCHES)
def test_what_the_advice_on_a_waiting_gpu_names_trains_the_same(words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 35)
    options, *switches = SWITCHES[words]
    columns = batch(length=48, padding=True)
    rows = [{name: column[row] for name, column in columns.items()} for row in range(4)]
    losses = []
    for arguments, attached in ({}, {}), switches:
        options = {**options, **arguments}
        trainer = trainer_for(build_patched("qwen3_moe", **ONE), tmp_path, per_device_train_batch_size=2, **options)
        trainer.train_dataset, trainer.data_collator = rows, collated((48, 47))
        sonicmoe_hf.attach(trainer, **attached)
        trainer.train()
        with says("What helps"), silent(words) if arguments or attached else says(words):
            advise(trainer)
        losses.append([log["loss"] for log in logs_of(trainer)])
    assert losses[1] == pytest.approx(losses[0], rel=EXACT)
