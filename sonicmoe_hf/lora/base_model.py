"""The model that an adapter was trained on, as its config.json describes it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..checkpoints.config_only import MAX_COUNT, build_on_meta
from ..checkpoints.configs import family_of, hub_config
from ..checkpoints.files import CONFIG_FILE, read_json
from ..checkpoints.layouts import NATIVE_PREFIX
from ..checkpoints.source import expected_tensors
from ..errors import CheckpointError, DoctorError
from ..layer.experts_module import Sizes
from ..model_patches import NATIVE_FAMILIES, NativeFamily
from ..patching.experts import experts_facts, sizes_of
from ..patching.support import find_layers
from .engines import SERVED_MODELS, ServedModel
from .rules import WITH_PEFT, adapter_layout

FUSED_LAYOUTS = {
    "concatenated": "fused",
    "transposed_interleaved": "gpt_oss",
}  # of experts in memory, as checkpoints are


class BaseModel(NamedTuple):
    """What of a model decides where an adapter's factors lie.

    model_type: the hub's. family, native: its native family, where it has one, and whether this is that layout.
    layout: the name in CHECKPOINT_LAYOUTS of its experts in memory, in the hub's order. blocks: the experts' sizes by
    block. plain: the shapes of the other tensors.
    """

    model_type: str
    family: NativeFamily | None
    native: bool
    layout: str
    blocks: dict[str, Sizes]
    plain: dict[str, tuple[int, ...]]

    @property
    def is_interleaved(self) -> bool:
        """Whether gate's and up's rows alternate in the experts' first weight."""
        return self.layout == "gpt_oss"

    @property
    def served(self) -> ServedModel | None:
        """How engines hold its experts; None where that is not known here."""
        return SERVED_MODELS.get(self.model_type)


def read_base_model(folder: Path) -> BaseModel:
    """The model whose config.json is in `folder`, in any layout and of any family that Transformers builds.

    Raises:
        CheckpointError: it cannot be built, or has no experts whose weights are known here, or experts without a gate.
    """
    path = folder / CONFIG_FILE
    config = read_json(path)
    model_type = str(config.get("model_type")).removeprefix(NATIVE_PREFIX)
    if model_type in NATIVE_FAMILIES:
        family, native = family_of(config, path)
        expected = expected_tensors(hub_config(config, family), family, path, MAX_COUNT)
        return BaseModel(model_type, family, native, adapter_layout(family, False), expected.blocks, expected.plain)
    try:
        model = build_on_meta(str(folder))
    except DoctorError as error:
        raise CheckpointError(str(error)) from error
    layers = list(find_layers(model))
    if not all(experts_facts(layer.experts).activation.is_gated for layer in layers):
        raise CheckpointError(
            f"{path}: the experts of {model_type} have no gate, and only adapters of experts with gate and up are "
            f"converted; load this one with PEFT as it is, or {WITH_PEFT}"
        )
    layouts = {FUSED_LAYOUTS.get(experts_facts(layer.experts).layout) for layer in layers}
    layout = layouts.pop() if len(layouts) == 1 else None
    if layout is None:
        raise CheckpointError(f"{path}: {model_type} has no experts, or experts in an order that is not known here")
    blocks = {layer.name: sizes_of(layer.experts) for layer in layers}
    inside = tuple(f"{block}.experts." for block in blocks)
    plain = {name: tuple(t.shape) for name, t in model.state_dict().items() if not name.startswith(inside)}
    return BaseModel(model_type, None, False, layout, blocks, plain)
