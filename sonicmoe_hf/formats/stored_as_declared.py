"""Checks of safetensors files against what config.json declares: packed weights that it does not declare, or declared
integers that no file has, are errors before Transformers reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import CheckpointError
from .declared_integers import COMPRESSED, GPTQ
from .matrix_format import MatrixFormat
from .tensor_files import open_tensors

PLAIN_BLOCKS = "proj_blocks"  # how the name of an MXFP4 weight ends
PLAIN_DTYPES = ("F32", "BF16", "F16")  # dtypes in the headers of safetensors files
TO_PLAIN_NAMES = (
    "are plain weights under the names of packed ones, as save_pretrained writes a model that was loaded with "
    "dequantize=True; rename them: AutoModelForCausalLM.from_pretrained(SRC, "
    'key_mapping={"proj_blocks$": "proj"}).save_pretrained(DST, save_original_format=False)'
)
CODE_SUFFIXES = {".qweight": GPTQ, ".weight_packed": COMPRESSED}  # of names of codes, with a method that writes such
FLOAT8 = ("F8_E4M3", "F8_E5M2")  # dtypes in the headers of safetensors files


def check_undeclared(files: Iterable[Path]) -> None:
    """Raise CheckpointError where safetensors files of a checkpoint that declares no quantization hold an FP8 weight, one
    in integers or a plain one under the name of a packed one: Transformers would take codes for values, or the weights
    for missing; and where a file is not whole."""
    for file in files:
        with open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                if name.endswith(PLAIN_BLOCKS) and tensors.get_slice(name).get_dtype() in PLAIN_DTYPES:
                    raise CheckpointError(f"{name} and others in {file} {TO_PLAIN_NAMES}")
                method = next((method for end, method in CODE_SUFFIXES.items() if name.endswith(end)), None)
                if method is not None or tensors.get_slice(name).get_dtype() in FLOAT8:
                    kind, method = ("FP8", "fp8") if method is None else ("packed in integers", method)
                    raise CheckpointError(
                        f"{name} in {file} is {kind}, but the checkpoint's config declares no quantization, so its codes "
                        "would be taken for weights; add quantization_config to config.json as the original has it "
                        f'({{"quant_method": "{method}", ...}}), leave out config=, or load the bf16 checkpoint'
                    )


def check_stored(files: Iterable[Path], format: MatrixFormat) -> None:
    """Raise CheckpointError where no tensor of safetensors files has the name of codes in the format that config.json
    declares, one of integers': in others codes are called weight, as dense values are."""
    first = format.names(".weight")[0]
    for file in files:
        with open_tensors(file) as tensors:
            if any(name.endswith(first) for name in tensors.keys()):  # noqa: SIM118
                return
    raise CheckpointError(
        f"the checkpoint's config declares a quantization to {format.name}, but no weight is in it (there is no "
        f"...{first}); remove quantization_config from config.json"
    )
