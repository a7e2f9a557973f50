"""SonicMoEExperts, and the model classes of the native layout: a family's own model with these experts in it.

Importing this module builds the classes (model_type sonicmoe_<family>, SonicMoE<Family>ForCausalLM); registration.py
makes them known to AutoConfig, AutoModel and AutoModelForCausalLM. Nothing of Transformers is rewritten: a native model
class runs its family's own __init__, and in post_init, before weights are initialised, swaps the experts and gives the
inner model its native class. Blocks, routers and decoder layers are the family's own, so that what works with them by
class or by name (output recording, device maps, FSDP, patching) works here too.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers import initialization as init
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from ..errors import CheckpointError
from ..formats.state_dicts import state_dict_names
from ..layer.experts_module import IMPLEMENTATION, Sizes
from ..layer.moe_experts import Activation
from ..model_patches import NATIVE_FAMILIES, NATIVE_PREFIX, NativeFamily
from ..patching.experts import ExpertsFacts, experts_facts, sizes_of, sonicmoe_hf_experts_forward
from ..patching.forwards import IS_OURS
from ..patching.moe_layers import load_family_class
from ..private.transformers import register_recording
from .layouts import HUB_CONFIG_KEY, LAYOUT_VERSION, NATIVE_NAMES, VERSION_KEY

if TYPE_CHECKING:  # what NativeConfig and NativeModel are mixed into
    from transformers import PreTrainedConfig as _ConfigBase
    from transformers import PreTrainedModel as _ModelBase
else:
    _ConfigBase = _ModelBase = object

CONVERT = "convert it first: sonicmoe-hf convert SRC DST --layout native"
STYLES = {  # name in the family's tp plan: style here; no family splits biases
    "gate_up_proj": "colwise",  # gate and up rows alternate: a plain slice of rows holds pairs of both
    "down_proj": "rowwise",
}


class SonicMoEExperts(nn.Module):
    """The experts of one layer in the native layout, computed by `moe_experts`.

    Args:
        config: the model's config. sizes: E, H, I and whether there are biases. activation: the gated activation.
    Parameters:
        c_fc [E, 2I, H], gate and up rows alternating; c_proj [E, H, I]; c_fc_bias [E, 2I] and c_proj_bias [E, H] or None.
        Their order decides names inside PEFT adapters, and is the reverse of the families' own on purpose
        (adapters/trained_model.py says why).
    """

    is_transposed = False  # read by PEFT: out features before in features
    weight_names = ("c_fc", "c_proj")

    def __init__(self, config, sizes: Sizes, activation: Activation):
        super().__init__()
        num_experts, hidden, intermediate, has_bias = sizes
        self.config = config
        self.num_experts = num_experts
        self.hidden_dim = hidden
        self.intermediate_dim = intermediate
        self.activation = activation
        made_in: Any = {
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
        }  # as in other modules
        self.c_proj = nn.Parameter(torch.empty(num_experts, hidden, intermediate, **made_in))
        self.c_proj_bias = nn.Parameter(torch.empty(num_experts, hidden, **made_in)) if has_bias else None
        self.c_fc = nn.Parameter(torch.empty(num_experts, 2 * intermediate, hidden, **made_in))
        self.c_fc_bias = nn.Parameter(torch.empty(num_experts, 2 * intermediate, **made_in)) if has_bias else None
        self._is_expert_parallel = False
        self.register_load_state_dict_pre_hook(_check_native_names)

    @classmethod
    def like(cls, experts: Any) -> SonicMoEExperts:
        """Make uninitialised native experts of the sizes, activation, dtype and device of a family's own."""
        facts = experts_facts(experts)
        sizes = sizes_of(experts)
        with torch.device(experts.down_proj.device):
            native = cls(experts.config, sizes, facts.activation)
        return native.to(experts.down_proj.dtype)

    @property
    def facts(self) -> ExpertsFacts:
        """The facts of this module's computation, as for any other experts."""
        return ExpertsFacts(self.activation, "interleaved", self.c_fc_bias is not None)

    def forward(self, hidden_states, top_k_index, top_k_weights, sonicmoe_hf_adapters=None):
        """Compute the experts' output [T, H] for `hidden_states` [T, H]; see `sonicmoe_hf_experts_forward`."""
        return sonicmoe_hf_experts_forward(self, hidden_states, top_k_index, top_k_weights, sonicmoe_hf_adapters)

    vars(forward)[IS_OURS] = True

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """Fill weights with normal values and biases with zeros, as every family initialises its experts."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("bias"):
                init.zeros_(parameter)
            else:
                init.normal_(parameter, mean=0.0, std=std)

    def extra_repr(self) -> str:
        """Show sizes and activation."""
        return (
            f"num_experts={self.num_experts}, hidden_dim={self.hidden_dim}, intermediate_dim={self.intermediate_dim}, "
            f"activation={self.activation.name!r}"
        )


def _check_native_names(experts: nn.Module, state_dict, prefix: str, *_) -> None:
    foreign = [name for name in state_dict if name.startswith(prefix)]
    foreign = [name for name in foreign if name[len(prefix) :] not in state_dict_names(experts)]
    if foreign:
        raise CheckpointError(
            f"{foreign[0]} is not a weight of the native layout (experts.c_fc, experts.c_proj): it belongs to the "
            f"hub layout or to an adapter trained on it, whose rows stand in another order; {CONVERT}"
        )


def use_native_experts(model: nn.Module, family: NativeFamily) -> None:
    """Replace the family's own experts in every block of `model` by uninitialised native ones."""
    block_class = load_family_class(family, "block")
    module: Any
    for module in model.modules():
        if isinstance(module, block_class) and not isinstance(module.experts, SonicMoEExperts):
            module.experts = SonicMoEExperts.like(module.experts)


class NativeConfig(_ConfigBase):
    """The part of a native model's config that its family's has not.

    sonicmoe_layout_version: of the checkpoint's layout. sonicmoe_hub_config: entries of the hub's config.json that
    conversion replaced, for the way back.
    """

    auto_map: ClassVar[dict] = {}  # TRL reads it where `architectures` names no class of Transformers

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Make the family's, after checking that this is the config of a native checkpoint we can read."""
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise CheckpointError(
                f"this is a checkpoint of model_type {model_type!r}, not {cls.model_type!r}; {CONVERT}, and load the "
                "result with AutoModelForCausalLM"
            )
        version = config_dict.get(VERSION_KEY)
        if version != LAYOUT_VERSION:
            raise CheckpointError(
                f"{VERSION_KEY} is {version!r}; this sonicmoe-hf reads version {LAYOUT_VERSION}: update sonicmoe-hf, or "
                "convert the checkpoint again"
            )
        return super().from_dict(config_dict, **kwargs)


class NativeModel(_ModelBase):
    """The part of a native model class that its family's has not."""

    sonicmoe_family: NativeFamily

    def post_init(self):
        """Swap the experts in, then the family's own: initialise weights, gather parallel plans."""
        use_native_experts(self, self.sonicmoe_family)
        inner = getattr(self, self.base_model_prefix, None)
        if inner is not None and not isinstance(inner, NativeModel):
            inner.__class__ = NATIVE[self.sonicmoe_family.name].model  # the family's __init__ built its own
            register_recording(inner)
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, SonicMoEExperts):
            module.init_weights(self.config.initializer_range)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Name the one implementation of the native layout, "sonicmoe_hf".

        Raises:
            ValueError: another one was asked for.
        """
        if requested_experts not in (None, IMPLEMENTATION):
            raise ValueError(
                f'experts_implementation is "{requested_experts}", but {type(self).__name__} computes its experts with '
                f'"{IMPLEMENTATION}" alone; for others convert the checkpoint: sonicmoe-hf convert SRC DST --layout hub'
            )
        return super().get_correct_experts_implementation(IMPLEMENTATION)

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        """Call Transformers' from_pretrained; experts missing from the checkpoint are an error, not a random start.

        Raises:
            CheckpointError: the checkpoint is not in the native layout.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        missing = sorted(name for name in info["missing_keys"] if ".experts.c_" in name)
        if missing:
            raise CheckpointError(f"the checkpoint has no {missing[0]}: it is not in the native layout; {CONVERT}")
        return (model, info) if output_loading_info else model

    def load_adapter(self, *args, **kwargs):
        """Call Transformers' load_adapter; an adapter trained on the hub layout is an error, not a partial load.

        Raises:
            CheckpointError: the adapter holds weights for experts that are not this layout's.
        """
        info = super().load_adapter(*args, **kwargs)
        foreign = sorted(name for name in getattr(info, "unexpected_keys", ()) if ".experts." in name)
        if foreign:
            raise CheckpointError(f"the adapter's {foreign[0]} has no place in the native layout; {CONVERT}")
        return info


def _renamed_plan(plan: dict[str, str] | None) -> dict[str, str | None] | None:
    """Rename experts in a tp or ep plan; `packed` styles become plain ones, as rows alternate."""
    if plan is None:
        return None
    renamed: dict[str, str | None] = {}
    for pattern, style in plan.items():
        module, _, name = pattern.rpartition(".")
        if module.endswith(".experts"):
            renamed[f"{module}.{NATIVE_NAMES[name]}"] = style if style == "grouped_gemm" else STYLES.get(name)
        else:
            renamed[pattern] = style
    return renamed


def _new_class(name: str, bases: tuple[type, ...], members: dict) -> type[Any]:
    cls = types.new_class(name, bases, exec_body=lambda namespace: namespace.update(__module__=__name__, **members))
    globals()[name] = cls  # classes are pickled by reference
    return cls


def _native_config(family: NativeFamily) -> type[Any]:
    base = load_family_class(family, "config")
    members = {
        "__annotations__": {VERSION_KEY: int, HUB_CONFIG_KEY: dict | None},
        "__doc__": f"The config of a {base.__name__.removesuffix('Config')} model in the native layout.",
        "model_type": NATIVE_PREFIX + family.name,
        VERSION_KEY: LAYOUT_VERSION,
        HUB_CONFIG_KEY: None,
        "base_model_tp_plan": _renamed_plan(base.base_model_tp_plan),
        "base_model_ep_plan": _renamed_plan(base.base_model_ep_plan),
    }
    return _new_class(f"SonicMoE{base.__name__}", (NativeConfig, base), members)


def _native_model(family: NativeFamily, role: str, config: type) -> type[Any]:
    base = load_family_class(family, role)
    members = {
        "__doc__": f"{base.__name__} with its experts in the native layout.",
        "__annotations__": {"config": config},
        "config_class": config,
        "sonicmoe_family": family,
    }
    return _new_class(f"SonicMoE{base.__name__}", (NativeModel, base), members)


class NativeClasses:
    """The native classes of one family: its config, its model, and that with a language model head."""

    def __init__(self, family: NativeFamily):
        self.config = _native_config(family)
        self.model = _native_model(family, "model", self.config)
        self.causal_lm = _native_model(family, "causal_lm", self.config)

    def register(self) -> None:
        """Register the family's classes with the Auto classes."""
        name = self.config.model_type
        AutoConfig.register(name, self.config, exist_ok=True)
        AutoModel.register(self.config, self.model, exist_ok=True)
        AutoModelForCausalLM.register(self.config, self.causal_lm, exist_ok=True)
        # the Trainer looks class names up here: without them label smoothing would not shift the labels
        MODEL_MAPPING_NAMES[name] = self.model.__name__
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] = self.causal_lm.__name__


NATIVE: dict[str, NativeClasses] = {name: NativeClasses(family) for name, family in NATIVE_FAMILIES.items()}
