"""The adapter of a whole model, as PEFT makes it, and as PEFT collects its tensors to save them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import peft.functional
import peft.peft_model
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import save_and_load

from . import dropout, packed_base, shares
from .config import without_false_alarms
from .loaded_names import names_that_are_loaded
from .named_base import warn_of_other_family

_PEFTS_INJECT = BaseTuner.inject_adapter
_PEFTS_STATE = save_and_load.get_peft_model_state_dict


def _inject_adapter(self, model, *args, **kwargs):
    """Inject an adapter as BaseTuner does. Every way to make one passes here.

    Its config is compared with the base, and remembers how that is packed; a dropout that it was saved with comes back.
    Of experts that ranks share, all adapters beside are averaged.
    """
    config = self.peft_config.get(args[0] if args else kwargs.get("adapter_name"))
    if config is not None:
        packed_base.remember(config, model)
        warn_of_other_family(config, model)
        dropout.restore_dropout(config)
    shares.reshard_root(model)
    with without_false_alarms(config, model):
        result = _PEFTS_INJECT(self, model, *args, **kwargs)
    shares.average_other_adapters(model)
    return result


def _get_peft_model_state_dict(model, state_dict=None, *args, **kwargs):
    """Collect an adapter as PEFT does, with the factors of all experts, under names that PEFT's own loading changes into
    no others."""
    tensors = _PEFTS_STATE(model, shares.with_whole_factors(model, state_dict), *args, **kwargs)
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return names_that_are_loaded(base, tensors)


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """List the replacements by which PEFT makes and collects adapters so, as in peft_wrapper.py."""
    yield BaseTuner, "inject_adapter", _inject_adapter
    for module in (peft, peft.functional, peft.peft_model, peft.utils, save_and_load):  # each has the function's name
        if hasattr(module, "get_peft_model_state_dict"):
            yield module, "get_peft_model_state_dict", _get_peft_model_state_dict
