"""The models of a process of `sonicmoe-hf run`: patched as they are built, attached to their Trainers, and reported."""

from __future__ import annotations

import atexit
import copy
import functools
import inspect
import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel, Trainer

from ...errors import UnsupportedModelError
from ...models.patch import patch_model, unpatch_model
from ...patching.loading_packed import FOR_FILE, with_packed_experts
from ...patching.moe_layers import every_experts, is_patched, transformers_model
from ...private.replaced import RUN, replace
from ...registration import install_in_peft
from ...routing.patched_model import check_and_hook_routers, set_routing
from ...trainer.report import FirstStepReport, Remedies, describe, write
from .settings import RunSettings, from_environment

COMMAND = "sonicmoe-hf run"
REMEDIES = Remedies(
    "--adapt-experts RANK before the program's name", "--experts-quantization nf4 before the program's name"
)


class Session:
    """The session of this process. `reasons`: for every live model, why it is not patched, or None."""

    def __init__(self, settings: RunSettings):
        self.settings = settings
        self.policy = settings.policy()
        self.reasons: weakref.WeakKeyDictionary[PreTrainedModel, str | None] = weakref.WeakKeyDictionary()
        self.training_args: weakref.WeakKeyDictionary[PreTrainedModel, Any] = weakref.WeakKeyDictionary()
        self.reported: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
        self.printed: set[str] = set()
        self.adapted: list[Any] = []  # LoRA configs that got the experts
        self.has_packed = self.has_attached = False
        self.thread = threading.local()  # is_loading: from_pretrained patches what it has loaded
        self.has_trained = False

    def install(self) -> None:
        """Follow the process's optimizers, Trainers and adapters, and its end."""
        atexit.register(self.at_exit)
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self.report())
        if self.settings.adapt_experts is not None:
            self._follow_adapters()
        train: Any = Trainer.train

        @functools.wraps(train)
        def attached_train(trainer, *args, **kwargs):
            self.prepare(trainer)
            return train(trainer, *args, **kwargs)

        replace(Trainer, "train", attached_train, by=RUN)

    def _follow_adapters(self) -> None:
        """Call `adapt` with every adapter's config and the model that PEFT is about to apply it to."""
        from peft.tuners.tuners_utils import BaseTuner

        install_in_peft()  # whose functions call those that they found
        inject: Any = BaseTuner.inject_adapter

        @functools.wraps(inject)
        def inject_adapter(tuner, model, adapter_name, *args, **kwargs):
            self.adapt(tuner.peft_config[adapter_name], model)
            return inject(tuner, model, adapter_name, *args, **kwargs)

        replace(BaseTuner, "inject_adapter", inject_adapter, by=RUN)

    def built(self, model: PreTrainedModel) -> None:
        """Patch a model whose constructor has ended."""
        if not getattr(self.thread, "is_loading", False):
            self._patch(model)

    def load(self, load, cls: type, args: tuple, kwargs: dict) -> Any:
        """Call `load(*args, **kwargs)`, which is `cls.from_pretrained`, with packed experts where that is asked for."""
        if getattr(self.thread, "is_loading", False):
            return load(*args, **kwargs)
        self.thread.is_loading = True
        try:
            format = self.settings.experts_quantization
            name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            packs = format is not None and self._has_experts(cls, name, kwargs)
            if format is not None and packs:
                kwargs = with_packed_experts(name, kwargs, format)
            loaded = load(*args, **kwargs)
        finally:
            self.thread.is_loading = False
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        self.has_packed = self.has_packed or packs
        self._patch(model)
        return loaded

    def _has_experts(self, cls: Any, name: Any, kwargs: dict) -> bool:
        """Tell whether models of this class and config have experts that can be packed."""
        config = kwargs.get("config")
        if not hasattr(config, "model_type"):
            where = {key: kwargs[key] for key in FOR_FILE if key in kwargs}
            config = cls.config_class.from_pretrained(name if config is None else config, **where)
        with torch.device("meta"):
            return bool(every_experts(cls(copy.deepcopy(config))))

    def _patch(self, model: PreTrainedModel) -> None:
        """Patch the model, or note why it cannot be.

        Raises:
            UnsupportedModelError: it is accelerated, but cannot do the routing that was asked for.
        """
        try:
            patch_model(model, save=self.settings.save)
        except UnsupportedModelError as error:
            unpatch_model(model)
            self.reasons[model] = str(error)
            return
        if self.policy is not None:
            check_and_hook_routers(model, self.policy, remedy=f"leave out --routing of {COMMAND}")
            set_routing(model, self.policy)
        self.reasons[model] = None

    def prepare(self, trainer: Any) -> None:
        """Make a Trainer that begins to train log the experts' load and restore experts, where its model is patched.

        Raises:
            ValueError: token rounding in a trainer of reinforcement learning or preference optimization.
        """
        from ...trainer.attach import attach
        from ...trainer.policy_trainers import check_no_policy_trainer

        try:
            patched = isinstance(trainer.model, nn.Module) and is_patched(trainer.model)
        except (TypeError, ValueError):  # no Transformers model, or several
            return
        if not patched:
            return
        if self.policy is not None:
            check_no_policy_trainer(trainer, trainer.args, remedy=f"leave out --routing of {COMMAND}")
        attach(trainer, compile=True if self.settings.compile else None)
        trainer.remove_callback(FirstStepReport)  # `report` says it
        self.training_args[transformers_model(trainer.model)] = trainer.args
        self.has_attached = True

    def make_grpo(self, trainer: Any, make: Any, args: tuple, kwargs: dict) -> None:
        """Construct one of TRL's GRPOTrainers by `make`; one that samples by vLLM, and has an adapter, as
        `sonicmoe_hf.vllm_adapters` has it.

        Raises:
            As that.
        """
        from ...trl.factory import vllm_adapters
        from ...trl.trainers import SendsAdapters

        given = inspect.signature(make).bind_partial(*args, **kwargs).arguments
        samples = getattr(given.get("args"), "use_vllm", False)
        has_adapter = given.get("peft_config") is not None or hasattr(given.get("model"), "peft_config")
        if samples and has_adapter and not isinstance(trainer, SendsAdapters):
            trainer.__class__ = vllm_adapters(type(trainer))
            with trainer.constructing():
                make(*args, **kwargs)
        else:
            make(*args, **kwargs)

    def adapt(self, config: Any, model: nn.Module) -> None:
        """Add the experts to a LoRA config of the program that is about to be applied to a model."""
        from .adapters import add_experts

        is_done = config.inference_mode or any(config is adapted for adapted in self.adapted)
        rank = self.settings.adapt_experts
        if rank is not None and not is_done and isinstance(model, PreTrainedModel) and is_patched(model):
            add_experts(config, model, rank)
            self.adapted.append(config)

    def _outermost(self) -> list[PreTrainedModel]:
        """Find the live models that are in no other, and have weights."""
        models = list(self.reasons)
        inner = {module for model in models for module in model.modules() if module is not model}
        has_weights = [model for model in models if any(not weight.is_meta for weight in model.parameters())]
        return [model for model in has_weights if model not in inner]

    def report(self) -> None:
        """Say at an optimiser's first step what was patched, and why not the rest. Later steps only where models are new.

        Raises:
            RuntimeError: --adapt-experts, --experts-quantization or --compile had no effect.
        """
        if self.has_trained and all(model in self.reported for model in self.reasons):
            return
        self.has_trained = True
        self._check_effects()
        self._print()

    def _check_effects(self) -> None:
        settings = self.settings
        for option, value, had_effect, lacking in (
            ("adapt-experts", settings.adapt_experts, self.adapted, "applied no LoRA config to a model with experts"),
            (
                "experts-quantization",
                settings.experts_quantization,
                self.has_packed,
                "loaded no model with experts by from_pretrained",
            ),
            ("compile", settings.compile or None, self.has_attached, "begun to train no Trainer's model with experts"),
        ):
            if value is not None and not had_effect:
                words = option if value is True else f"{option} {value}"
                raise RuntimeError(
                    f"--{words} had no effect: training begins, and the program has {lacking}; leave the option out"
                )

    def _print(self) -> None:
        for model in self._outermost():
            if model not in self.reported:
                args = self.training_args.get(model)
                text = describe(model, self.reasons[model], self.has_trained, REMEDIES, args)
                if text not in self.printed:
                    write(text)
                self.printed.add(text)
                if args is not None:  # a reference or a copy is as the trained model, but for what balances that
                    self.printed.add(describe(model, self.reasons[model], self.has_trained, REMEDIES))
        self.reported.update(self.reasons)

    def at_exit(self) -> None:
        """Say what was patched when a program ends that trained nothing."""
        if not self.has_trained and self._outermost():
            write("the program ended before a training step")
            self._print()


@functools.cache
def session() -> Session:
    """Make the session of this process, once."""
    current = Session(from_environment())
    current.install()
    return current
