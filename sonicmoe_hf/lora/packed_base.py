"""PackedBase: the packing of the experts that an adapter was trained beside, which its adapter_config.json remembers.

An adapter may learn to make up for what its base's rounding lost, and so belongs to that packing. PEFT reads and writes
auto_mapping, an entry of its config, as it is: there stands the format, with sums of some codes and of some norms, which
AWQ scales before it packs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..errors import CheckpointError
from ..formats.declared import declared_quantization
from ..formats.json_files import check_items, check_type, read_json
from ..layer.experts_module import packable
from ..layer.holding import is_partitioned, local_tensor, mesh_of
from ..layer.packed_weight import PackedWeight
from ..private import attributes
from .named_base import config_of
from .names import without_base_layer

logger = logging.getLogger(__name__)
ENTRY = "sonicmoe_hf_base"
AUTO_MAPPING = "auto_mapping of adapter_config.json"
LAYERS = 4
OTHER = (
    "the adapter was trained on experts in {trained}, and those of {model} are in {here}; it may have learned to make up "
    "for that rounding, so take the base that it was trained on"
)
NOT_PACKED = (
    "the adapter was trained on experts in {trained}, and those of {model} are not packed: what it gives lacks the "
    "rounding of training, so compare the losses, or load the base with experts_quantization={name!r} "
    "(sonicmoe-hf check: --experts-quantization {name})"
)
OTHER_NORMS = (
    "the adapter was trained beside other norms than {model} has: AWQ scales norms and rows before it packs, so the "
    "inputs of the experts are others here, and the adapter does not belong to these weights; merge it into the "
    "checkpoint that it was trained on, or into what sonicmoe-hf convert made of that"
)
NORM_TOLERANCE = 2**-7  # bf16 and fp16 round a weight by 2**-9 and less; AWQ's scales are factors of 0.3 to 3
_said: set[str] = set()


class PackedBase(NamedTuple):
    """The packing of a model's experts.

    format: its name. codes: of some layers, the sum of their first expert's codes as bytes, which is the same in every
    order of rows, unlike NF4's scales; none where they are not known. norms: of a few norms, by name, the
    sum of magnitudes; none where ranks share them.
    """

    format: str
    codes: list[int]
    norms: dict[str, float] | None = None

    def __str__(self) -> str:
        return f"{self.format} (checksums {', '.join(map(str, self.codes)) or 'unknown'})"

    @property
    def option(self) -> str:
        """The experts_quantization by which experts get this packing."""
        return self.format.removeprefix("u")  # "int4" takes uint4

    @classmethod
    def of_model(cls, model: nn.Module) -> PackedBase | None:
        """Find the packing of a model in memory, on a rank that has the first experts; None of dense experts."""
        held = [[local_tensor(getattr(module, name)) for name in packable(module)] for module in model.modules()]
        layers = [
            weights for weights in held if weights and isinstance(weights[0], PackedWeight) and weights[0].format
        ]
        if not layers or layers[0][0].codes.is_meta:
            return None
        packed = cls.of_layers(layers[0][0].format, layers, lambda weight: weight.codes[0])
        return packed._replace(norms=_norms_of(model))

    @classmethod
    def of_layers(cls, format: str, layers: list[list], first_codes: Callable[[Any], torch.Tensor]) -> PackedBase:
        """Sum codes of a few layers.

        Args:
            layers: the packed weights of each. first_codes: reads the codes of a weight's first expert.
        """
        few = layers[:: max(1, len(layers) // LAYERS)][:LAYERS]
        sums = (sum(int(first_codes(weight).view(torch.uint8).sum()) for weight in layer) for layer in few)
        return cls(format, list(sums))

    @classmethod
    def of_adapter(cls, auto_mapping: dict | None) -> PackedBase | None:
        """Read the packing that an adapter_config.json remembers; None of dense experts, or where it says nothing.

        Raises:
            CheckpointError: auto_mapping, or what it remembers, is damaged.
        """
        check_type({"auto_mapping": auto_mapping}, "auto_mapping", dict, "adapter_config.json")
        check_type(auto_mapping or {}, ENTRY, dict, AUTO_MAPPING)
        entry = (auto_mapping or {}).get(ENTRY)
        if not entry:
            return None
        if not isinstance(entry.get("format"), str) or not isinstance(entry.get("codes") or [], list):
            raise CheckpointError(f"{AUTO_MAPPING}: {ENTRY} is {entry!s:.80}, without format or codes")
        check_type(entry, "norms", dict, AUTO_MAPPING)
        check_items(entry, "norms", (int, float), AUTO_MAPPING)
        return cls(entry["format"], entry.get("codes") or [], entry.get("norms"))

    def is_scaled_otherwise(self, read: Callable[[str], torch.Tensor | None]) -> bool:
        """Tell whether norms have other values than in training. read: gives one by its name, None where none is."""
        pairs = ((trained, read(name)) for name, trained in (self.norms or {}).items())
        return any(
            abs(_magnitude(norm) - trained) > NORM_TOLERANCE * trained for trained, norm in pairs if norm is not None
        )

    def difference_from(self, here: PackedBase | None, model_name: str) -> str | None:
        """Tell, in a sentence, that the experts of a model are packed otherwise than those of training; None if not."""
        if here and self.format == here.format and (self.codes == here.codes or [] in (self.codes, here.codes)):
            return None
        if here is None:
            return NOT_PACKED.format(trained=self.format, model=model_name, name=self.option)
        return OTHER.format(trained=self, model=model_name, here=here)


def _magnitude(norm: torch.Tensor) -> float:
    return float(norm.detach().double().abs().sum())


def _norms_of(model: nn.Module) -> dict[str, float]:
    """Measure the last norm of a few layers with experts: it comes before the experts, so AWQ scales it."""
    layers = [without_base_layer(name).rsplit(".", 2)[0] for name, module in model.named_modules() if packable(module)]
    norms: dict[str, tuple[str, nn.Parameter]] = {}  # by layer
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and name.endswith("norm.weight"):
            norms[name.rsplit(".", 2)[0]] = name, weight
    last = [norms[layer] for layer in layers if layer in norms]
    few = last[:: max(1, len(last) // LAYERS)][:LAYERS]
    is_elsewhere = any(mesh_of(weight) is not None or is_partitioned(weight) or weight.is_meta for _, weight in few)
    return {} if is_elsewhere else {name: _magnitude(weight) for name, weight in few}


def option_to_load(auto_mapping: dict | None, base: str | Path) -> str | None:
    """Find the experts_quantization with which `base`, a folder or the id of a hub's model, has to be loaded to have the
    experts that an adapter was trained beside; None where its own files have them so."""
    trained = PackedBase.of_adapter(auto_mapping)
    return None if trained is None or trained.format == _declared_format(base) else trained.option


def _declared_format(base: str | Path) -> str | None:
    """Find the experts' format in a model's folder, or in the config that the hub's cache has; None of dense ones, and
    where there is neither."""
    file = Path(base) / "config.json"
    try:
        declared = declared_quantization(read_json(file) if file.is_file() else config_of(str(base)), file.parent)
        return None if declared is None else declared.format_name()
    except (OSError, ValueError):  # no config, or no format of ours
        return None


def remember(config: Any, model: nn.Module) -> None:
    """Note in the config of an adapter, which PEFT puts on `model`, what it is trained on; warn once where that
    changes."""
    if dist.is_initialized() and dist.get_rank() != 0:  # who saves nothing, and has other experts
        return
    trained, here = PackedBase.of_adapter(config.auto_mapping), PackedBase.of_model(model)
    sentence = None if trained is None else trained.difference_from(here, type(model).__name__)
    named = getattr(model, "name_or_path", "")  # "" of a model that is built from a config
    if here is None and named and option_to_load(config.auto_mapping, named) is None:
        sentence = None  # Transformers expanded the very values
    if sentence is not None and sentence not in _said:
        _said.add(sentence)
        logger.warning(f"sonicmoe_hf: {sentence}")
    if trained is not None and not config.inference_mode:
        config.auto_mapping = {key: value for key, value in config.auto_mapping.items() if key != ENTRY} or None
    setattr(config, attributes.PACKED_BASE, trained if config.inference_mode else here)


def with_packing(config: Any, auto_mapping: dict | None) -> dict | None:
    """Add the packing of its base to the auto_mapping with which PEFT would save an adapter's config."""
    base = getattr(config, attributes.PACKED_BASE, None)
    if base is None or not (auto_mapping or config.task_type is not None):  # PEFT takes a mapping for one of classes
        return auto_mapping
    return {**(auto_mapping or {}), ENTRY: base._asdict()}
