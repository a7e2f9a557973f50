"""Every mixture-of-experts architecture of the installed Transformers: its experts equal eager's, and token
rounding works or is refused."""

import ast
import importlib.util
import inspect
import textwrap

import pytest
import torch
import transformers
from helpers.architectures import (
    DOCUMENT,
    EXPERTS,
    HIDDEN,
    TOKENS,
    TOP_K,
    architectures,
    build_from_config,
    family_of,
    layers_of,
    with_table,
)
from helpers.blocks import hands_indices_to_experts
from helpers.models import ORDER_OF_SUMS, assert_all_close, gradients_of, relative_error, twin

import sonicmoe_hf
from sonicmoe_hf.layer.experts_module import IMPLEMENTATION
from sonicmoe_hf.layer.routing import TokenRounding
from sonicmoe_hf.model_patches import FAMILIES, deepseek_v2, deepseek_v3, mixtral, olmoe
from sonicmoe_hf.patching.experts import UnsupportedExpertsError
from sonicmoe_hf.patching.moe_layers import find_layers, load_family_class

REFUSED = {
    "MuseSparkExperts": "its experts end in a norm of their own",
}
CURRENT = pytest.mark.skipif(
    not transformers.__version__.startswith(("5.23.", "5.24.")), reason="facts are of Transformers 5.23 and 5.24"
)
EVERY = pytest.mark.parametrize("architecture", architectures(), ids=lambda a: a.experts)
WITH_FACTS = [architecture for architecture in architectures() if family_of(architecture)]


@pytest.mark.parametrize("architecture", WITH_FACTS, ids=lambda a: a.experts)
def test_the_block_of_every_family_hands_its_routers_indices_on(architecture):
    for layer in find_layers(layers_of(architecture)):
        assert hands_indices_to_experts(layer.block, layer.family)


def output_and_gradients(module, *inputs):
    """Compute the output, and the gradients of the first input and of all parameters, for a fixed random projection."""
    x = inputs[0].clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    out = module(x, *inputs[1:])
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return {"out": out.detach(), "x": x.grad, **gradients_of(module)}


@EVERY
def test_its_experts_equal_eagers_or_are_refused_by_name(architecture):
    experts = build_from_config(architecture, architecture.experts)
    hidden = experts.up_proj.shape[2] if hasattr(experts, "up_proj") else getattr(experts, "hidden_dim", HIDDEN)
    x, index = torch.randn(20, hidden), torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(20)])
    inputs = x, index, torch.rand(20, TOP_K)
    if architecture.experts in REFUSED:
        experts.config._experts_implementation = IMPLEMENTATION
        with pytest.raises(UnsupportedExpertsError, match=REFUSED[architecture.experts]):
            experts(*inputs)
        return
    expected = output_and_gradients(experts, *inputs)
    experts.config._experts_implementation = IMPLEMENTATION
    assert_all_close(output_and_gradients(experts, *inputs), expected, 1e-5, ORDER_OF_SUMS)


@pytest.mark.parametrize("architecture", WITH_FACTS, ids=lambda a: a.experts)
def test_its_block_routes_and_rounds_by_its_own_formula(architecture):
    """A tile of one row rounds nothing: the routing made from scores must equal the router's own."""
    model, x = layers_of(architecture).train(), torch.randn(1, TOKENS, HIDDEN)
    ours = twin(model)
    expected = output_and_gradients(model, x)
    sonicmoe_hf.patch_model(ours)
    assert_all_close(output_and_gradients(ours, x), expected, 1e-5, ORDER_OF_SUMS)
    sonicmoe_hf.set_routing(ours, TokenRounding(tile=1, min_tiles_per_expert=0))
    assert_all_close(output_and_gradients(ours, x), expected, 1e-5, ORDER_OF_SUMS)
    sonicmoe_hf.set_routing(ours, TokenRounding(tile=8, min_tiles_per_expert=0))
    assert relative_error(output_and_gradients(ours, x)["out"], expected["out"]) > 1e-3, "rounding had no effect"


def test_token_rounding_without_facts_is_refused_by_name():
    without = next(a for a in architectures() if a.experts == "JambaExperts")
    words = r"no token rounding in layer: token rounding does not"
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match=words):
        sonicmoe_hf.patch_model(layers_of(without), "token_rounding")


@CURRENT
def test_every_family_has_an_architecture():
    assert {family.name for a in WITH_FACTS for family in family_of(a)} == {
        name for name, family in FAMILIES.items() if is_installed(family)
    }


def is_installed(family) -> bool:
    """Tell whether the installed Transformers has the family: the newest does not come with the oldest."""
    return importlib.util.find_spec(family.module.rpartition(".")[0]) is not None


def forward_of(family) -> str:
    """Read the source of the router's forward without its docstring and annotations."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(load_family_class(family, "router").forward))).body
    if isinstance(function.body[0], ast.Expr):
        function.body.pop(0)
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    return ast.unparse(function)


@CURRENT
@pytest.mark.parametrize(
    "families",
    [deepseek_v3.FAMILIES, olmoe.FAMILIES, deepseek_v2.FAMILIES, mixtral.FAMILIES[:2], mixtral.FAMILIES[2:]],
    ids=lambda f: f[0].name,
)
def test_routers_that_share_facts_have_the_same_forward(families):
    first, *others = families
    differ = [family.name for family in others if is_installed(family) and forward_of(family) != forward_of(first)]
    assert not differ, f"Transformers changed a router: {differ} no longer compute what {first.name} does"


@pytest.mark.skipif(not transformers.__version__.startswith("5.24."), reason="the table is of Transformers 5.24")
def test_the_table_in_the_documents_is_current():
    text = DOCUMENT.read_text()
    assert with_table(text) == text, "run: PYTHONPATH=.:tests python -m helpers.architectures"
