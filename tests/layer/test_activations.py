"""Activations of experts, as Transformers' models name or hold them: each that we claim is the
one that eager computes."""

import pytest
import torch
from helpers.models import build, relative_error
from torch import nn
from torch.nn import functional as F
from transformers import NemotronHConfig
from transformers.activations import ACT2FN
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from sonicmoe_hf.layer.experts_module import IMPLEMENTATION
from sonicmoe_hf.patching.experts import UnsupportedExpertsError, experts_facts

UNGATED_SIZES = {"hidden_size": 32, "moe_intermediate_size": 16, "n_routed_experts": 8}
CLAIMED = {
    "swiglu": ["silu", "swish", nn.SiLU(), F.silu],
    "geglu": ["gelu", "gelu_python", nn.GELU(), F.gelu],
    "geglu_tanh": [
        "gelu_new",
        "gelu_fast",
        "gelu_accurate",
        "gelu_pytorch_tanh",
        "gelu_python_tanh",
        nn.GELU(approximate="tanh"),
    ],
    "reglu": ["relu", nn.ReLU(), F.relu, torch.relu],
}


WITHOUT_GATE = {
    "silu": CLAIMED["swiglu"],
    "gelu": CLAIMED["geglu"],
    "gelu_tanh": CLAIMED["geglu_tanh"],
    "relu": CLAIMED["reglu"],
    "relu2": ["relu2"],
}


def pairs(claimed):
    return [(name, act_fn) for name in claimed for act_fn in claimed[name]]


def experts_with(act_fn, ungated=False):
    """Build small experts that compute in fp64, with this activation."""
    experts = next(m for m in build("qwen3_moe").modules() if hasattr(type(m), "_apply_gate")).double()
    if ungated:
        experts = NemotronHExperts(NemotronHConfig(**UNGATED_SIZES)).double()
        for weight in experts.parameters():
            nn.init.normal_(weight, 0, 0.3)
    del experts.act_fn  # a module gives its place to no function
    experts.act_fn = ACT2FN[act_fn] if isinstance(act_fn, str) else act_fn
    return experts


@pytest.mark.parametrize(("name", "act_fn"), [*pairs(CLAIMED), *pairs(WITHOUT_GATE)])
def test_an_activation_that_we_claim_is_the_one_transformers_computes(name, act_fn):
    experts = experts_with(act_fn, ungated=name in WITHOUT_GATE)
    assert experts_facts(experts).activation.name == name
    x, index = 2 * torch.randn(40, 32, dtype=torch.float64), torch.randint(0, 8, (40, 1))
    weights = torch.rand(40, 1, dtype=torch.float64)
    experts.config._experts_implementation = "eager"
    wanted = experts(x, index, weights)
    experts.config._experts_implementation = IMPLEMENTATION
    error = relative_error(experts(x, index, weights), wanted)
    assert error < 1e-8, "fp64; gelu_fast and gelu_accurate round the constant sqrt(2 / pi), to 10 digits at least"


@pytest.mark.parametrize("act_fn", ["gelu_10", "quick_gelu", "mish", "relu2", torch.sigmoid, F.leaky_relu])
def test_other_activations_are_refused_by_name(act_fn):
    experts = experts_with(act_fn)
    name = getattr(experts.act_fn, "__name__", type(experts.act_fn).__name__)
    with pytest.raises(UnsupportedExpertsError, match=f"its activation {name} is not one of those behind"):
        experts_facts(experts)


def test_a_gelu_of_ones_own_is_not_taken_for_torch_s():
    class Shifted(nn.GELU):
        def forward(self, x):
            return super().forward(x) + 1

    with pytest.raises(UnsupportedExpertsError, match="its activation Shifted"):
        experts_facts(experts_with(Shifted()))


def test_experts_with_a_function_compile_without_graph_breaks():
    torch._dynamo.reset()
    experts = experts_with(F.gelu)
    experts.config._experts_implementation = IMPLEMENTATION
    arguments = torch.randn(8, 32, dtype=torch.float64), torch.randint(0, 8, (8, 2)), torch.rand(8, 2).double()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), experts(*arguments))
