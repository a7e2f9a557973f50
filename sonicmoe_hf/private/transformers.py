"""Transformers' private parts, and accelerate's."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from .replaced import replace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICATED_HOOK = "_replicated_grad_hook_registered"  # attribute of parameters whose gradients are averaged over ranks
SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"  # environment variable: weights are read by one thread, one by one
AUTO_CLASSES: tuple[Any, ...] = (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModel,
)
CLASSIFIERS: tuple[Any, ...] = (  # which are loaded where `architectures` names them alone
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
)
LOADING_METHODS = ("_load_from_checkpoint", "_load_best_model")  # of a Trainer
OPTIMIZER_LOADING_METHOD = "_load_optimizer_and_scheduler"  # of a Trainer: the schedule too


def experts_implementation(config) -> str | None:
    """Get the experts implementation that a config asks for."""
    return getattr(config, "_experts_implementation", None)


def experts_implementation_at_once(config) -> str | None:
    """Get config._experts_implementation in a tenth of the time that a PreTrainedConfig takes to look an attribute up."""
    return object.__getattribute__(config, "__dict__").get("_experts_implementation_internal")


def set_experts_implementation(config, name: str | None) -> None:
    """Set the experts implementation of a config; its sub-configs keep theirs."""
    config._experts_implementation = {"": name}


_taking_weights: ContextVar[Callable[[Any, str], None] | None] = ContextVar("what takes loaded weights", default=None)


@contextmanager
def loaded_one_by_one(take: Callable[[Any, str], None]) -> Iterator[None]:
    """Call `take(model, name)` as soon as from_pretrained, inside `with`, has loaded a weight, before the next one is
    loaded; and reserve no memory for all of them."""
    from transformers import core_model_loading, modeling_utils

    set_parameter, warmup = core_model_loading.set_param_for_module, modeling_utils.caching_allocator_warmup
    is_true = core_model_loading.is_env_variable_true

    @functools.wraps(set_parameter)
    def set_param_for_module(model, target_name, *args, **kwargs):
        set_parameter(model, target_name, *args, **kwargs)
        if (taking := _taking_weights.get()) is not None:
            taking(model, target_name)

    @functools.wraps(warmup)
    def caching_allocator_warmup(*args, **kwargs):
        return warmup(*args, **kwargs) if _taking_weights.get() is None else None

    @functools.wraps(is_true)
    def is_env_variable_true(name):  # else threads bring weights to the GPU faster than they are taken
        return (name == SYNCHRONOUS and _taking_weights.get() is not None) or is_true(name)

    replace(core_model_loading, "set_param_for_module", set_param_for_module)
    replace(modeling_utils, "caching_allocator_warmup", caching_allocator_warmup)
    replace(core_model_loading, "is_env_variable_true", is_env_variable_true)
    token = _taking_weights.set(take)
    try:
        yield
    finally:
        _taking_weights.reset(token)


def mark_initialized(parameter: Any) -> None:
    """Note that a checkpoint brought a parameter, so that loading does not initialise it."""
    parameter._is_hf_initialized = True


def auto_class_of(config):
    """Find the Auto class of the model that the config's `architectures` names, which is more than a base model; else the
    first that has a model for this config, of text before images and sound; None without any."""
    with_model = [auto_class for auto_class in AUTO_CLASSES if type(config) in auto_class._model_mapping]
    declared = set(getattr(config, "architectures", None) or ())
    named = (
        auto_class
        for auto_class in (*with_model, *CLASSIFIERS)
        if auto_class is not AutoModel and declared & _models_of(auto_class, config)
    )
    return next(named, next(iter(with_model), None))


def _models_of(auto_class, config) -> set[str]:
    if type(config) not in auto_class._model_mapping:
        return set()
    models = auto_class._model_mapping[type(config)]
    return {model.__name__ for model in (models if isinstance(models, (list, tuple)) else (models,))}


def computes_loss(config) -> bool:
    """Tell whether the model that `auto_class_of` this config loads takes labels."""
    auto_class = auto_class_of(config)
    if auto_class is None:
        return False
    return "labels" in inspect.signature(auto_class._model_mapping[type(config)].forward).parameters


def parallel_mesh(model, dimension: str) -> DeviceMesh | None:
    """Get the ranks over which Transformers splits this model by tensor ("tp") or pipeline ("pp") parallelism; None where
    it does not."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or ("tp",)  # the deprecated tp_plan="auto" makes a mesh without names
    if dimension not in names:
        return None
    mesh = mesh[dimension] if len(names) > 1 else mesh
    return mesh if mesh.size() > 1 else None


def register_recording(model) -> None:
    """Make a model whose class was set after its __init__ record outputs, such as router_logits, as its class does.

    The register is by the class's name; Transformers 5.23 takes a model for a key and makes that name of it.
    """
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(model)), model._can_record_outputs)


def recorded_outputs() -> dict[str, list] | None:
    """Get the outputs of modules, such as router_logits, that the model's call in progress records; None outside one."""
    from transformers.utils.output_capturing import _active_collector

    return _active_collector.get()


@contextmanager
def recording_into(records: dict[str, list]) -> Iterator[None]:
    """Record modules' outputs in these lists, by hooks that torch.compile can trace: outside compiled models
    Transformers' read a ContextVar."""
    from transformers.utils.output_capturing import _active_collector as collector

    before = collector.compiling, collector.global_var
    collector.compiling, collector.global_var = True, records
    try:
        yield
    finally:
        collector.compiling, collector.global_var = before


def strictly_fp32_modules(model) -> set[str]:
    """List the names of the modules whose weights a model never casts."""
    return set(model._keep_in_fp32_modules_strict or ())


def ignored_on_load(model) -> list[str]:
    """List patterns of the names that a checkpoint may hold besides the model's."""
    return list(model._keys_to_ignore_on_load_unexpected or ())


def missing_allowed(model) -> list[str]:
    """List patterns of the names that a checkpoint may lack."""
    return list(model._keys_to_ignore_on_load_missing or ())


def weight_conversions(model) -> list | None:
    """Get the conversions of from_pretrained that save_pretrained reverts; [] after fused ones, None without any."""
    return getattr(model, "_weight_conversions", None)


def forget_dequantization(module) -> None:
    """Make save_pretrained write the weights of dequantized models in `module` as they are, plain.

    from_pretrained(quantization_config=...(dequantize=True)) notes the conversions that read the quantized checkpoint,
    and save_pretrained reverts them: plain weights get names of packed ones, or cannot be saved. They become those of
    the plain checkpoint; and configs of inner models, where some checkpoints declare the quantization, lose it."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    for model in module.modules():
        if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
            continue
        conversions = weight_conversions(model) or ()
        was_quantized = any(map(_reads_quantized, conversions))
        if was_quantized:
            plain = {_targets(each): each for each in get_model_conversion_mapping(model, add_legacy=False)}
            kept = [plain.get(_targets(each)) if _reads_quantized(each) else each for each in conversions]
            vars(model)["_weight_conversions"] = [each for each in kept if each is not None]
        # Transformers 5.24 leaves such conversions out itself, and clears the outer config alone
        if was_quantized or not hasattr(model.config, "quantization_config"):
            for owner in model.modules():
                for config in [each for each in vars(owner).values() if isinstance(each, PreTrainedConfig)]:
                    _forget_quantization(config)


def _reads_quantized(conversion) -> bool:
    """Tell whether a conversion has an operation of a quantizer."""
    return any(hasattr(operation, "hf_quantizer") for operation in getattr(conversion, "operations", ()))


def _targets(conversion) -> tuple[str | None, ...]:
    """Name the parameters that a conversion makes: its inner model and their patterns."""
    return (getattr(conversion, "scope_prefix", None), *conversion._original_target_patterns)


def _forget_quantization(config) -> None:
    vars(config).pop("quantization_config", None)
    for name in type(config).sub_configs:
        if isinstance(inner := getattr(config, name, None), PreTrainedConfig):
            _forget_quantization(inner)


def load_converted(model, files: list[str], conversions: list):
    """Load files by Transformers' loader, through the conversions, into new tensors in the modules' slots, and return its
    report on names. The model's own conversions stay."""
    from transformers import modeling_utils

    config = modeling_utils.LoadStateDictConfig(weight_mapping=copy.deepcopy(conversions))
    own_conversions = weight_conversions(model)
    try:
        return PreTrainedModel._load_pretrained_model(model, None, files, config)[0]
    finally:
        vars(model).pop("_weight_conversions", None)
        if own_conversions is not None:
            vars(model)["_weight_conversions"] = own_conversions


def warn_after_load(trainer, result) -> None:
    """Make a Trainer warn of names that a checkpoint lacked, and of those that its model lacked."""
    trainer._issue_warnings_after_load(result)


def mean_logged_loss(trainer):
    """Compute the mean of a Trainer's losses since it logged, which it adds in place of one that is NaN or infinite: a
    tensor [] on its device."""
    return trainer._tr_loss / (1 + trainer.state.global_step - trainer._globalstep_last_logged)


def save_random_state(trainer, folder: str) -> None:
    """Write this rank's random numbers where the Trainer looks for them when it resumes."""
    trainer._save_rng_state(folder)


def read_scalars_whole() -> None:
    """Make Transformers read a number that a checkpoint stores beside a sharded weight as it is: there is nothing to be
    cut. It is one of this rank's experts, or a linear layer's."""
    try:
        from transformers.distributed.sharding_utils import DtensorShardOperation
    except ImportError:  # before 5.23, where we split no experts
        return
    own: Any = DtensorShardOperation.shard_tensor

    @functools.wraps(own)
    def shard_tensor(self, source, tensor_idx=None, device=None, dtype=None):
        shape = tuple(source.shape if hasattr(source, "shape") else source.get_shape())
        if shape not in ((), (1,)) or self.param_ndim < 2:
            return own(self, source, tensor_idx=tensor_idx, device=device, dtype=dtype)
        if self.param_ndim == 3 and tensor_idx is not None:
            expert = tensor_idx % self._axis0_size - self._axis0_offset
            if not 0 <= expert < self._axis0_local_size:
                return None
        return source[...].to(device=device, dtype=dtype)

    replace(DtensorShardOperation, "shard_tensor", shard_tensor)
