"""convert_checkpoint: a checkpoint from the hub layout to the native one and back, streamed shard by shard.

Memory: the shard being written, and the pages of the one source file that is open. The result appears whole or not at
all: it is written into a hidden folder beside its destination and renamed at the end.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..formats.declared import EXPERT_DTYPE, MODELOPT_FILE
from ..formats.hub import HubFormat
from ..kernels.packed import FORMATS
from ..layer.config import check_choice
from .atomic_folder import appearing_whole, copy_file, new_folder, save_tensors, write_json
from .companions import companions
from .config_only import build_from_config
from .configs import has_native_layout, hub_config, native_config
from .converters import complete_groups
from .files import CONFIG_FILE, INDEX_FILE, read_config
from .hub import local_folder
from .hub_named import HubNamed
from .model_card import Origin, add_card, origin_of
from .output import TARGETS, Output, OutputTensors, shell
from .packed_config import check_format, quantization_config
from .relayout import Relayout
from .roundings import LayerRounding
from .source import Source
from .stored import DTYPES, StoredWeights
from .weight import UntiedWeight

ALIGNED = 64  # bytes
OF_QUANTIZED = ("quantization_config", EXPERT_DTYPE)  # entries of config.json that dense checkpoints do not have
# of config.json: Transformers 5's name, and the one before, which may both be there
DTYPE_ENTRIES = {"dtype", "torch_dtype"}


class Conversion(NamedTuple):
    """A new checkpoint.

    path: the new checkpoint. family, source_layout, target_layout: names of NATIVE_FAMILIES and of `detect_layout`.
    tensors, nbytes, shards: what was written. notices: what else a user should know, in sentences. roundings: what
    rounding to the result's format did to a merged adapter's changes, layer by layer.
    """

    path: Path
    family: str
    source_layout: str
    target_layout: str
    tensors: int
    nbytes: int
    shards: int
    notices: list[str]
    roundings: list[LayerRounding]


def convert_checkpoint(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    layout: str = "native",
    *,
    dtype: str | None = None,
    dequantize: bool | None = None,
    quantize: str | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = False,
    revision: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Convert a checkpoint between the hub layout and the native one. Weights are moved; they change only if a cast,
    quantization or dequantization is asked for. Of families without a native layout, quantized checkpoints become dense,
    and packed ones get the hub's names.

    Args:
        src: folder, or hub id. dst: the new folder; it must not exist. layout: "native" or "hub".
        dtype: cast weights to "float32", "bfloat16" or "float16"; by default each keeps its own.
        dequantize: MXFP4 (gpt-oss), FP8 (DeepSeek), NVFP4 (ModelOpt) and packed weights become bf16. None does so and
            notes it in the result's `notices`, False raises CheckpointError.
        quantize: "nf4", "mxfp4", "fp8", "nvfp4" or "int4" packs the experts (see `quantize_experts`); those that are
            packed already keep their blocks in that format. In the hub layout "mxfp4" for gpt-oss, and for the other
            families "fp8" or "int4", which is compressed-tensors' pack-quantized.
        max_shard_size: bytes, or text such as "5GB". It, one file of `src` and, packing, one weight bound the memory.
        verify: raise an error for NaN and infinity, and read back and compare every byte that is written.
        revision: of a hub id. on_progress: called with (bytes done, bytes in all).
    Returns:
        What was done.
    Raises:
        CheckpointError: a tensor, file or config entry is unknown, missing, wrong or contradictory, the disk is too
            small or `dst` exists; the message names it and nothing is written. OSError: writing fails.
    Example:
        sonicmoe_hf.convert_checkpoint("Qwen/Qwen3-30B-A3B", "qwen3-native", layout="native")
    """
    check_choice("layout", layout, TARGETS)
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    if quantize is not None:
        check_choice("quantize", quantize, FORMATS)
        if dequantize:
            raise CheckpointError(f"quantize={quantize!r} and dequantize=True contradict each other; leave one out")
    dst = new_folder(dst)
    folder = local_folder(src, revision)
    if has_native_layout(read_config(folder)) or layout == "native" or quantize is not None:
        target = target_of(Source(folder), layout, dtype, dequantize, quantize)
    else:
        target = _dense_target(StoredWeights(folder), dtype, dequantize)
    return write_checkpoint(target, dst, origin_of("convert", src), max_shard_size, verify, on_progress)


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


def write_checkpoint(
    target: Target,
    dst: Path,
    origin: Origin,
    max_shard_size: int | str,
    verify: bool,
    on_progress: Callable[[int, int], None] | None,
) -> Conversion:
    """Write `target`, with the files that lie beside the weights it is made of, and its model card; see
    `convert_checkpoint`."""
    stored, output, notices = target.output.stored, target.output, target.notices
    tensors = output.tensors()
    own = {header.file for header in stored.tensors.values()} | {CONFIG_FILE, INDEX_FILE}
    if not output.keeps_format:
        own.add(MODELOPT_FILE)
    beside = companions(stored.folder, own, target.adapter)
    shards = _shards(tensors, max_shard_size)
    nbytes = sum(each.nbytes for each in tensors)
    progress = _Progress(nbytes * (1 + verify), on_progress)
    with appearing_whole(dst, nbytes, list(beside.sources), len(shards)) as folder:
        _write_shards(folder, shards, verify, progress)
        write_json(folder / CONFIG_FILE, target.config)
        for file, source in beside.sources.items():
            copy_file(source, folder / file)
        stored.close()
        notices = notices + beside.notices + output.roundings.notices()
        add_card(folder, dst.name, origin, _format_of(target), notices)
    return Conversion(
        dst,
        *target[:3],
        sum(len(each.shells) for each in tensors),
        nbytes,
        len(shards),
        notices,
        output.roundings.layers(),
    )


def _format_of(target: Target) -> str:
    """Describe a checkpoint that is written."""
    layout = "Transformers' and the engines'" if target.target_layout != "native" else "sonicmoe_hf's native"
    declared = target.config.get("quantization_config")
    if declared is None:
        return f"{layout} layout, dense"
    return f"{layout} layout, experts in {declared.get('experts') or declared.get('quant_method')}"


def target_of(
    source: Source,
    layout: str,
    dtype: str | None = None,
    dequantize: bool | None = None,
    quantize: str | None = None,
) -> Target:
    """Describe the checkpoint that `convert_checkpoint` writes of `source` under these of its arguments."""
    check_choice("layout", layout, TARGETS)
    target_layout = "native" if layout == "native" else source.family.hub_layout
    quantize = source.format_named(quantize)
    layouts = source.family.name, source.layout, target_layout
    packed, notices = None, []
    if quantize is None:
        notices = _quantization_notices(source, dequantize)
    else:
        if layout == "hub" and dtype is not None:
            raise CheckpointError(
                f"quantize={quantize!r} writes the hub's layout and leaves other tensors their dtype; leave layout and "
                "dtype out"
            )
        keeps = source.quantization == quantize
        if keeps and not source.packed_here and source.layout == target_layout:
            return own_target(source, layouts, keeps_format=True)
        check_format(source, quantize, layout)
        packed = quantization_config(source, quantize, layout)
        if keeps and not any(weight.change for weight in source.weights.values()):
            notices = [f"the experts' {quantize} blocks are those of {source.folder}"]
    wanted = None if dtype is None else DTYPES[dtype]
    output = Output(source, wanted)
    if source.layout != target_layout or quantize is not None:
        output = Relayout(source, target_layout, wanted, None if quantize is None else FORMATS[quantize])
    return Target(*layouts, output, _config(source, layout, dtype, packed), notices)


def _dense_target(stored: StoredWeights, dtype: str | None, dequantize: bool | None) -> Target:
    """Describe `stored`, of a family without a native layout, dense under the hub's names.

    Raises:
        CheckpointError: it is so already; weights are missing, or a packed one has no such name.
    """
    if stored.quantization is None and dtype is None:
        raise CheckpointError(
            f"{stored.folder} is not quantized, and {stored.config['model_type']} has no other layout; give dtype= "
            "to cast it"
        )
    model = build_from_config(stored.config, stored.folder / CONFIG_FILE)
    complete_groups(model, stored.shapes, stored.folder)  # raises
    return dense_target(stored, model, dtype, dequantize)


def dense_target(
    stored: StoredWeights, model: PreTrainedModel, dtype: str | None = None, dequantize: bool | None = None
) -> Target:
    """Describe `stored`, of a family without a native layout, dense: under the names of its files, or where sonicmoe_hf
    packed it under the hub's. model: the checkpoint's, on the meta device."""
    notices, wanted = _quantization_notices(stored, dequantize), None if dtype is None else DTYPES[dtype]
    output = HubNamed(stored, model, wanted) if stored.packed_here else Output(stored, wanted)
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
    if untied is not None and isinstance(stored.format, HubFormat):  # whose config lists what is dense, in many forms
        raise CheckpointError(
            f"{untied} has no weight of its own in {stored.folder}, and gets one, which loading would take to be in "
            f"{stored.quantization}; leave quantize='keep' (--quantize keep) out, so that all weights become bf16"
        )
    notices = [f"what nothing changed is as in {stored.folder} bit by bit, in {stored.quantization}"]
    if stored.packed_here:
        notices += [
            f"the experts were packed as {stored.quantization} by sonicmoe_hf, so the checkpoint that they were packed "
            "from may still be there: merge into that and pack the result, which loses less (sonicmoe-hf merge ORIGINAL "
            "ADAPTER DST, then convert --quantize)",
            "this result loads in sonicmoe_hf alone, as its base does",
        ]
    return Target(*layouts, output, dict(stored.config), notices)


def _quantization_notices(source: StoredWeights, dequantize: bool | None) -> list[str]:
    if source.quantization is None:
        return []
    if dequantize is False:
        raise CheckpointError(
            f"{source.folder} is quantized ({source.quantization}): conversion can only dequantize such weights"
        )
    if dequantize:
        return []
    dtype = str(source.dense_dtype).removeprefix("torch.")
    notices = [f"the weights were {source.quantization} and are {dtype} now"]
    if source.packed_here:
        format = FORMATS[source.quantization]
        notices.append(
            f"what rounding to {format.name} lost stays lost: about {format.loss}% of a weight "
            "(root mean square), unless the model was trained in that format, as gpt-oss was"
        )
    return notices


def _shards(tensors: list[OutputTensors], max_shard_size: int | str) -> dict[str, list[OutputTensors]]:
    """Choose files: their names and what they will hold. Tensors that are made together are in one file."""
    size = int(max_shard_size) if str(max_shard_size).isdigit() else max_shard_size
    by_name = {next(iter(each.shells)): each for each in tensors}
    whole = {name: shell((each.nbytes,), torch.uint8) for name, each in by_name.items()}
    files = split_torch_state_dict_into_shards(whole, max_shard_size=size).filename_to_tensors
    return {file: [by_name[name] for name in names] for file, names in files.items()}


class _Progress:
    def __init__(self, total: int, on_progress):
        self.total, self.done, self.on_progress = total, 0, on_progress

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


def _write_shards(folder: Path, shards: dict[str, list[OutputTensors]], verify: bool, progress: _Progress) -> None:
    shells = {file: {n: s for each in own for n, s in each.shells.items()} for file, own in shards.items()}
    starts = {file: _starts(list(own.values())) for file, own in shells.items()}
    memory = torch.empty(max(of_file[-1] for of_file in starts.values()), dtype=torch.uint8, device="cpu")
    for file, own in shards.items():
        tensors = {
            name: _place(like, memory[start:]) for (name, like), start in zip(shells[file].items(), starts[file])
        }
        for each in own:
            each.fill([tensors[name] for name in each.shells])
            progress.add(each.nbytes)
        save_tensors(folder / file, tensors, verify)
        progress.add(verify * sum(each.nbytes for each in own))
    if len(shards) > 1:
        weight_map = {name: file for file, own in shells.items() for name in own}
        total = sum(each.nbytes for own in shards.values() for each in own)
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _starts(shells: list[torch.Tensor]) -> list[int]:
    """Choose where in one piece of memory tensors begin, and where the last one ends. Made one by one, they would stand
    between temporaries, and the holes that those leave take as much again."""
    return list(itertools.accumulate((-(-shell.nbytes // ALIGNED) * ALIGNED for shell in shells), initial=0))


def _place(like: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def _config(source: Source, layout: str, dtype: str | None, quantization: dict | None) -> dict:
    """Make config.json of the result."""
    config = dense_config(source, source.hub_config, dtype)
    if quantization is not None:
        config["quantization_config"] = quantization
    return (native_config if layout == "native" else hub_config)(config, source.family)


def dense_config(stored: StoredWeights, config: dict, dtype: str | None = None) -> dict:
    """Return `config` as that of a checkpoint which is not quantized."""
    config = {key: value for key, value in config.items() if key not in OF_QUANTIZED}
    if isinstance(text := config.get("text_config"), dict):  # which may declare it in the model's place
        config["text_config"] = {key: value for key, value in text.items() if key not in OF_QUANTIZED}
    if stored.quantization is not None:
        dtype = dtype or str(stored.dense_dtype).removeprefix("torch.")
    if dtype is not None:
        config.update(dict.fromkeys(DTYPE_ENTRIES.intersection(config) or ("dtype",), dtype))
    return config
