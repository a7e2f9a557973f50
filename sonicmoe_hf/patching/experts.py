"""The experts forward that Transformers calls for experts_implementation="sonicmoe_hf"."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import (
    AccurateGELUActivation,
    FastGELUActivation,
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
    ReLUSquaredActivation,
    SiLUActivation,
)

from ..errors import UnsupportedExpertsError
from ..layer.adapters_argument import Adapters
from ..layer.experts_module import (
    Sizes,
    has_gate,
    is_experts,
    is_native,
    is_transposed,
    matrix_shape,
    num_experts_in,
    weight_names,
    whole_shape,
)
from ..layer.holding import has_share, local_tensor
from ..layer.moe_experts import Activation, check_fp8, moe_experts
from ..layer.routing import MISPLACED, Routing
from ..model_patches.family import modeling_module
from ..private import attributes
from .forwards import DEFAULT_APPLY_GATE, LIGERS, why_not_reached

ACTIVATIONS = {  # an experts module's act_fn, its class if it is a module: our name of it, without a gate
    SiLUActivation: "silu",
    nn.SiLU: "silu",
    F.silu: "silu",
    GELUActivation: "gelu",
    F.gelu: "gelu",
    GELUTanh: "gelu_tanh",
    NewGELUActivation: "gelu_tanh",
    FastGELUActivation: "gelu_tanh",
    AccurateGELUActivation: "gelu_tanh",
    nn.ReLU: "relu",
    F.relu: "relu",
    torch.relu: "relu",
    ReLUSquaredActivation: "relu2",
}
# the activation of a gate alone: our name of it with an up
GATED_BY = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
WITHOUT_NUMBERS = {*ACTIVATIONS.values(), *GATED_BY.values()}  # activations that are their name alone


class ExpertsFacts(NamedTuple):
    """The facts of an experts module that decide which function it computes."""

    activation: Activation
    layout: str
    has_bias: bool


def _refuse(
    experts: nn.Module, reason: str, remedy: str = 'load the model with experts_implementation="grouped_mm"'
) -> NoReturn:
    raise UnsupportedExpertsError(f"{type(experts).__name__}: {reason}; {remedy}")


def _default_gate(experts: Any) -> Activation:
    if not getattr(experts, "is_concatenated", True):
        _refuse(experts, "its weights are declared interleaved, but the default gate reads them concatenated")
    return Activation(_activation_name(experts))


def _gpt_oss_gate(experts: Any, alpha: str = "alpha", limit: str = "limit") -> Activation:
    """Read gpt-oss's gate; alpha, limit: the experts' attributes."""
    return Activation("clamped_swiglu", float(getattr(experts, alpha)), float(getattr(experts, limit)))


def _deepseek_v4_gate(experts: Any, limit: str = "limit") -> Activation:
    """Read DeepSeek-V4's gate; limit: the experts' attribute."""
    if hasattr(experts, "act_fn") and _activation_name(experts) != "swiglu":
        _refuse(experts, "its clamped gate has another activation than silu")
    return Activation("clamped_silu", limit=float(getattr(experts, limit)))


def _step3p7_gate(experts: Any) -> Activation:
    """Read Step-3.7's gate, of which most layers clamp nothing."""
    if _activation_name(experts) != "swiglu":
        _refuse(experts, "its clamped gate has another activation than silu")
    limit = float(experts.limit)
    return Activation("swiglu") if math.isinf(limit) else Activation("silu_clamped", limit=limit)


def _inkling_gate(experts: Any, expected: str) -> Activation:
    """Read Inkling's gate; expected: the class of the act_fn, which takes gate and up."""
    kind = type(experts.act_fn).__name__
    if kind != expected:
        _refuse(experts, f"its gate is {kind}, not {expected}")
    gate, up = (float(cap.softcap) for cap in (experts.act_fn.gate_softcap, experts.act_fn.up_softcap))
    return Activation("softcapped_swiglu", alpha=gate, limit=up)


GPT_OSS = modeling_module("gpt_oss"), "GptOssExperts"  # whose gate and up alternate
GATES: dict[
    tuple[str, str], Callable[[Any], Activation]
] = {  # module and name of a class: what its _apply_gate computes
    GPT_OSS: _gpt_oss_gate,
    (modeling_module("beam"), "BeamExperts"): _default_gate,  # in fp32, as we compute it anyway
    (modeling_module("openai_privacy_filter"), "OpenAIPrivacyFilterExperts"): _gpt_oss_gate,
    (modeling_module("minimax_m3_vl"), "MiniMaxM3VLExperts"): partial(
        _gpt_oss_gate, alpha="swiglu_alpha", limit="swiglu_limit"
    ),
    (modeling_module("deepseek_v4"), "DeepseekV4Experts"): _deepseek_v4_gate,
    (modeling_module("glm5_next"), "Glm5NextTextExperts"): partial(_deepseek_v4_gate, limit="swiglu_limit"),
    (modeling_module("hy_v4"), "HYV4Experts"): partial(_deepseek_v4_gate, limit="swiglu_limit"),
    (modeling_module("hy_v4_vl"), "HYV4VLExperts"): partial(_deepseek_v4_gate, limit="swiglu_limit"),
    (modeling_module("step3p7"), "Step3p7Experts"): _step3p7_gate,
    (modeling_module("inkling2"), "Inkling2Experts"): partial(_inkling_gate, expected="Inkling2SoftcappedSwiGLU"),
    (modeling_module("inkling2_loop"), "Inkling2LoopExperts"): partial(
        _inkling_gate, expected="Inkling2LoopSoftcappedSwiGLU"
    ),
}


def _gate(experts: Any) -> tuple[Activation, bool]:
    """Read (activation, interleaved) from the experts' own `_apply_gate`."""
    gate = type(experts)._apply_gate
    if gate is DEFAULT_APPLY_GATE:
        return _default_gate(experts), False
    owner = next(cls for cls in reversed(type(experts).__mro__) if getattr(cls, "_apply_gate", None) is gate)
    name = owner.__module__, owner.__name__
    if name not in GATES:
        _refuse(experts, f"its gate {'.'.join(name)}._apply_gate is not one that sonicmoe_hf implements")
    return GATES[name](experts), name == GPT_OSS


def _activation_name(experts: Any, is_gated: bool = True) -> str:
    """Name the activation that experts with this act_fn compute."""
    act_fn = experts.act_fn
    kind = type(act_fn) if isinstance(act_fn, nn.Module) else act_fn
    name = ACTIVATIONS.get(kind, "")
    if kind is nn.GELU:
        name = "gelu_tanh" if act_fn.approximate == "tanh" else "gelu"
    activation = GATED_BY.get(name) if is_gated else name
    if not activation:
        known = sorted(GATED_BY.values() if is_gated else set(ACTIVATIONS.values()))
        _refuse(experts, f"its activation {getattr(kind, '__name__', kind)} is not one of those behind {known}")
    return activation


def experts_facts(experts: Any) -> ExpertsFacts:
    """Read from an experts module's class and flags what it computes.

    Raises:
        UnsupportedExpertsError: something sonicmoe_hf does not compute; never a wrong number.
    """
    if is_native(experts):
        return experts.facts
    if type(experts).__name__ == LIGERS:
        raise UnsupportedExpertsError(why_not_reached(experts))
    if not is_experts(experts):
        _refuse(
            experts,
            "it does not go through Transformers' experts interface (quantized experts do not, for one)",
            "load the model unquantized (for gpt-oss: quantization_config=Mxfp4Config(dequantize=True))",
        )
    if getattr(experts, "has_post_expert_norm", False):
        _refuse(experts, "its experts end in a norm of their own")
    if has_gate(experts):
        activation, interleaved = _gate(experts)
    else:
        activation, interleaved = Activation(_activation_name(experts, is_gated=False)), False
    order = "interleaved" if interleaved else "concatenated"
    layout = f"transposed_{order}" if is_transposed(experts) else order
    return ExpertsFacts(activation, layout, getattr(experts, "has_bias", False))


def check_weights(experts: nn.Module) -> None:
    """Raise UnsupportedExpertsError where the weights are not the float tensors of three dimensions we compute with."""
    for name in weight_names(experts):
        weight = getattr(experts, name, None)
        # FSDP1's shards have one dimension, and nothing tells their shape
        if weight is None or len(whole_shape(weight)) not in (1, 3):
            _refuse(experts, f"it has no {name} of three dimensions")
        if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
            _refuse(experts, f"its {name} is stored as {weight.dtype}, quantized", "load the model unquantized")


def check_fp8_products(experts: nn.Module) -> None:
    """Raise ValueError where the experts' products cannot multiply in FP8."""
    facts = experts_facts(experts)
    gate_up, down = (local_tensor(getattr(experts, name)) for name in weight_names(experts))
    check_fp8(gate_up, down, facts.has_bias, facts.layout, facts.activation.name)


def sizes_of(experts: nn.Module) -> Sizes:
    """Read E, H, I and biases of experts, whatever their layout."""
    facts = experts_facts(experts)
    _, down = weight_names(experts)
    num_experts, hidden, intermediate = matrix_shape(experts, getattr(experts, down))
    return Sizes(num_experts, hidden, intermediate, facts.has_bias)


def known_facts(experts: Any) -> tuple[ExpertsFacts, tuple[str, str], int | None]:
    """Read (facts, names of the weights, E of the config) of experts. They are kept with a module whose activation has no
    numbers of its own, which somebody might change, as long as it has the same act_fn."""
    facts = experts_facts(experts)
    known = facts, weight_names(experts), num_experts_in(experts.config)
    if facts.activation.name in WITHOUT_NUMBERS and hasattr(experts, "act_fn") and not torch.compiler.is_compiling():
        vars(experts)[attributes.KNOWN_FACTS] = experts.act_fn, known
    return known


def sonicmoe_hf_experts_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor | Routing,
    top_k_weights: torch.Tensor,
    sonicmoe_hf_adapters: Adapters | None = None,
) -> torch.Tensor:
    """Compute the experts' output for `hidden_states` [T, H]: [T, H].

    `top_k_index` [T, K] and `top_k_weights` [T, K] are the router's; or `top_k_index` is a Routing made by token
    rounding, and `top_k_weights` its weights. `sonicmoe_hf_adapters` come from whoever wraps the experts. Under expert
    parallelism ids outside the local experts mean "elsewhere".

    Raises:
        ValueError: token rounding's Routing of all experts reached a module that holds only some of them.
    """
    act_fn, known = vars(self).get(attributes.KNOWN_FACTS, (None, None))
    facts, names, total = known_facts(self) if known is None or act_fn is not self.act_fn else known
    first, second = names
    adapters = {} if sonicmoe_hf_adapters is None else sonicmoe_hf_adapters.take()
    is_parallel = has_share(self, total)
    if not isinstance(top_k_index, Routing):
        routing = Routing(top_k_index, top_k_weights, sentinels=is_parallel)
    elif is_parallel and not top_k_index.is_local:
        raise ValueError(MISPLACED)
    else:
        routing = top_k_index.with_weights(top_k_weights)
    return moe_experts(
        hidden_states,
        getattr(self, first),
        getattr(self, second),
        routing,
        gate_up_bias=getattr(self, f"{first}_bias") if facts.has_bias else None,
        down_bias=getattr(self, f"{second}_bias") if facts.has_bias else None,
        gate_up_adapter=adapters.get(first),
        down_adapter=adapters.get(second),
        activation=facts.activation,
        layout=facts.layout,
        save=vars(self).get(attributes.SAVE, "preactivation"),
        compute=vars(self).get(attributes.COMPUTE),
    )
