"""The native layout's model types in Transformers' Auto classes. They are built when one is asked for.

Transformers knows its own models by names and imports them on demand; registered ones have to be there. So this module
puts a dict that builds on demand in the place where `AutoConfig.register` puts config classes: whoever looks a native
model_type up gets the family's classes built and registered.
"""

from __future__ import annotations

import importlib

from ..model_patches import NATIVE_FAMILIES
from ..private.transformers import registered_configs, replace_registered_configs
from .layouts import NATIVE_PREFIX


class _BuiltOnDemand(dict):
    """Config classes by model type, with those of native models among the keys from the start."""

    def __getitem__(self, model_type):
        if dict.__getitem__(self, model_type) is None:
            importlib.import_module(".modeling", __package__)  # puts the classes here
        return dict.__getitem__(self, model_type)

    def __iter__(self):  # not dict's own, or dict(self) would read the values past __getitem__
        return iter(list(dict.keys(self)))

    def values(self):
        return [self[key] for key in self]

    def items(self):
        return [(key, self[key]) for key in self]


# what AutoConfig registers afterwards comes beside it
replace_registered_configs(
    _BuiltOnDemand({**{NATIVE_PREFIX + name: None for name in NATIVE_FAMILIES}, **registered_configs()})
)
