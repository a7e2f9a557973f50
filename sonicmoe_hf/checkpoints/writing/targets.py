"""Target: a checkpoint to be written, its tensors, config.json and what users should know, before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from ...errors import CheckpointError
from ...formats.declared import EXPERT_DTYPE
from ...formats.matrix_format import MatrixFormat
from ...kernels.packed import FORMATS
from ...layer.config import check_choice
from ..layouts import CHECKPOINT_LAYOUTS, hub_config, native_config
from ..reading.config_only import build_from_config
from ..reading.files import CONFIG_FILE
from ..reading.source import Source
from ..reading.stored import DTYPES, StoredWeights
from ..reading.weight import UntiedWeight
from .hub_named import HubNamed
from .output import Output
from .packed_config import check_packing, keeps_blocks, quantization_config
from .relayout import Relayout

OF_QUANTIZED = ("quantization_config", EXPERT_DTYPE)  # entries of config.json that dense checkpoints do not have
# of config.json: Transformers 5's name, and the one before, which may both be there
DTYPE_ENTRIES = {"dtype", "torch_dtype"}


class Target(NamedTuple):
    """A checkpoint to be written.

    family, source_layout, target_layout: as Conversion's. output, config: the tensors, and config.json. notices: those
    that are known before. adapter: the folder of one that was added, whose tokenizer counts.
    """

    family: str
    source_layout: str
    target_layout: str
    output: Output
    config: dict
    notices: list[str]
    adapter: Path | None = None


def target_of(
    source: Source,
    layout: str,
    dtype: str | None = None,
    dequantize: bool | None = None,
    quantize: str | None = None,
) -> Target:
    """Describe the checkpoint that `convert_checkpoint` writes of `source` under these of its arguments."""
    check_choice("layout", layout, CHECKPOINT_LAYOUTS)
    target_layout = "native" if layout == "native" else source.family.hub_layout
    quantize = source.format_named(quantize)
    has_own_layout = not source.is_packed_here and source.layout == target_layout
    layouts = source.family.name, source.layout, target_layout
    packed, notices = None, []
    if quantize is None:
        check_dequantize(source, dequantize, has_own_layout or keeps_blocks(source, layout))
        notices = _quantization_notices(source, dequantize)
    else:
        if layout == "hub" and dtype is not None:
            raise CheckpointError(
                f"quantize={quantize!r} writes the hub's layout and leaves other tensors their dtype; leave layout and "
                "dtype out"
            )
        keeps = source.quantization == quantize
        if keeps and has_own_layout:
            return own_target(source, layouts, keeps_format=True)
        check_packing(source, quantize, layout)
        packed = quantization_config(source, quantize, layout)
        if keeps and not any(weight.change for weight in source.weights.values()):
            notices = [f"the experts' {quantize} blocks are those of {source.folder}"]
    wanted = None if dtype is None else DTYPES[dtype]
    output = Output(source, wanted)
    if source.layout != target_layout or quantize is not None:
        output = Relayout(source, target_layout, wanted, None if quantize is None else FORMATS[quantize])
    return Target(*layouts, output, _config(source, layout, dtype, packed), notices)


def checked_dense_target(stored: StoredWeights, dtype: str | None, dequantize: bool | None) -> Target:
    """Describe `stored`, of a family without a native layout, dense under the hub's names.

    Raises:
        CheckpointError: it is so already; weights are missing, or a packed one has no such name.
    """
    if stored.quantization is None and dtype is None:
        raise CheckpointError(
            f"{stored.folder} is not quantized, and {stored.config['model_type']} has no other layout; give dtype= "
            "to cast it"
        )
    check_dequantize(stored, dequantize)
    model = build_from_config(stored.config, stored.folder / CONFIG_FILE)
    stored.check_whole(model)
    return dense_target(stored, model, dtype, dequantize)


def dense_target(
    stored: StoredWeights, model: PreTrainedModel, dtype: str | None = None, dequantize: bool | None = None
) -> Target:
    """Describe `stored`, of a family without a native layout, dense: under the names of its files, or where sonicmoe_hf
    packed it under the hub's. model: the checkpoint's, on the meta device."""
    notices, wanted = _quantization_notices(stored, dequantize), None if dtype is None else DTYPES[dtype]
    output = HubNamed(stored, model, wanted) if stored.is_packed_here else Output(stored, wanted)
    config = dense_config(stored, stored.config, dtype)
    return Target(str(stored.config["model_type"]), "hub", "hub", output, config, notices)


def own_target(stored: StoredWeights, layouts: tuple[str, str, str], keeps_format: bool) -> Target:
    """Describe `stored` under the names of its files, in its own format, or dequantized where it is quantized. layouts:
    as Target's first.

    Raises:
        CheckpointError: the format is to be kept of weights that are not quantized, or of a head that was tied.
    """
    output = Output(stored, keeps_format=keeps_format)
    if not keeps_format:
        notices, config = _quantization_notices(stored, None), dense_config(stored, stored.config)
        return Target(*layouts, output, config, notices)
    if stored.quantization is None:
        raise CheckpointError(
            f"{stored.folder} is not quantized, so there is no format to keep; leave quantize out, and convert the "
            "result: sonicmoe-hf convert SRC DST --layout hub --quantize FORMAT"
        )
    untied = next((name for name, weight in stored.weights.items() if isinstance(weight, UntiedWeight)), None)
    if untied is not None and isinstance(
        stored.format, MatrixFormat
    ):  # whose config lists what is dense, in many forms
        raise CheckpointError(
            f"{untied} has no weight of its own in {stored.folder}, and gets one, which loading would take to be in "
            f"{stored.quantization}; leave quantize='keep' (--quantize keep) out, so that all weights become bf16"
        )
    notices = [f"what nothing changed is as in {stored.folder} bit by bit, in {stored.quantization}"]
    if stored.is_packed_here:
        notices += [
            f"the experts were packed as {stored.quantization} by sonicmoe_hf, so the checkpoint that they were packed "
            "from may still be there: merge into that and pack the result, which loses less (sonicmoe-hf merge ORIGINAL "
            f"ADAPTER DST, then sonicmoe-hf convert DST PACKED --layout native --quantize {stored.quantization})",
            "this result loads in sonicmoe_hf alone, as its base does",
        ]
    return Target(*layouts, output, dict(stored.config), notices)


def check_dequantize(source: StoredWeights, dequantize: bool | None, can_keep: bool = False) -> None:
    """Raise CheckpointError where weights that are quantized are not to be dequantized. can_keep: whether conversion
    could keep their format, if users ask for that."""
    format = source.quantization
    if format is not None and dequantize is False:
        remedy = "conversion can only dequantize such weights"
        if can_keep and format in FORMATS:
            remedy = f"give quantize={format!r} (--quantize {format}) to keep the experts in that format"
        raise CheckpointError(f"{source.folder} is quantized ({format}): {remedy}")


def _quantization_notices(source: StoredWeights, dequantize: bool | None) -> list[str]:
    """Make the notices for users whose quantized weights become dense without having been asked for."""
    if source.quantization is None or dequantize:
        return []
    dtype = str(source.dense_dtype).removeprefix("torch.")
    notices = [f"the weights were {source.quantization} and are {dtype} now"]
    if source.is_packed_here:
        format = FORMATS[source.quantization]
        notices.append(
            f"what rounding to {format.name} lost stays lost: about {format.loss}% of a weight "
            "(root mean square), unless the model was trained in that format, as gpt-oss was"
        )
    return notices


def _config(source: Source, layout: str, dtype: str | None, quantization: dict | None) -> dict:
    """Make config.json of the result."""
    config = dense_config(source, source.hub_config, dtype)
    if quantization is not None:
        config["quantization_config"] = quantization
    return (native_config if layout == "native" else hub_config)(config, source.family)


def dense_config(stored: StoredWeights, config: dict, dtype: str | None = None) -> dict:
    """Copy `config` as that of a checkpoint which is not quantized."""
    config = {key: value for key, value in config.items() if key not in OF_QUANTIZED}
    if isinstance(text := config.get("text_config"), dict):  # which may declare it in the model's place
        config["text_config"] = {key: value for key, value in text.items() if key not in OF_QUANTIZED}
    if stored.quantization is not None:
        dtype = dtype or str(stored.dense_dtype).removeprefix("torch.")
    if dtype is not None:
        config.update(dict.fromkeys(DTYPE_ENTRIES.intersection(config) or ("dtype",), dtype))
    return config
