"""Checkpoints in integers, written by the package's own inverse of its readers, which
tests/quantization/test_integers.py holds to what compressed-tensors, GPTQModel and AutoAWQ give."""

import json
import re
import shutil

import torch
from helpers.checkpoints import edit_config, rewrite, tensors_in

from sonicmoe_hf.formats.declared import DeclaredQuantization
from sonicmoe_hf.formats.integer_matrices import as_words
from sonicmoe_hf.kernels.packed import Quantized
from sonicmoe_hf.kernels.packed.int4 import group_of, int4_grid

EXPERTS = r"\.experts\.\d+\.\w+_proj\.weight$"
LINEAR = r"(_proj|kv_a_proj_with_mqa)\.weight$"


def compressed_config(format="pack-quantized", targets=("Linear",), **weights):
    """Write the quantization_config of compressed-tensors."""
    group = {"targets": [*targets], "input_activations": None, "output_activations": None}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "weights": weights}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    }


GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
DECLARED = {  # by kind: what config.json says
    "ct-32": compressed_config(),
    "ct-128": compressed_config(group_size=128),
    "ct-asym": {**compressed_config(symmetric=False), "ignore": ["lm_head", "re:.*mlp.gate$"]},
    "gptq": {**GPTQ, "group_size": 128},
    "gptq-asym": {**GPTQ, "sym": False, "group_size": 128},
    "gptq-v2": {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2", "group_size": 64},
    "auto-round": {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "group_size": 128},
    "auto-round-v2": {**AUTO_ROUND, "sym": False, "packing_format": "auto_round:gptqmodel"},
    "awq": {**AWQ, "group_size": 128},
    "auto-round-awq": {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"},
    "ct-8": compressed_config(num_bits=8),
    "mxfp4": compressed_config("mxfp4-pack-quantized", type="float"),
    "nvfp4": compressed_config("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
}


def format_of(kind, **changes):
    """Make the reader of the hub's matrices that a kind's config declares."""
    declared = {**DECLARED[kind], **changes}
    return DeclaredQuantization(declared["quant_method"], declared).loadable_matrix_format()


def stored_as(format, name, weight):
    """Pack a matrix: (the tensors that store it, by name, the values in fp32 that they stand for)."""
    size_out, size_in = weight.shape
    whole = min(format.group or size_in, size_in)
    group = group_of(size_in, format.group or size_in)
    num_groups, dtype = (
        format.num_groups(size_in),
        torch.bfloat16 if format.ends[0] == "weight_packed" else torch.float16,
    )
    zeros = torch.randint(6, 11, (size_out, num_groups)).to(torch.uint8)
    largest = torch.nn.functional.pad(weight.float().abs(), (0, -size_in % whole)).unflatten(1, (-1, whole)).amax(2)
    spread = [part.repeat_interleave(whole // group, 1)[:, : size_in // group] for part in (largest, zeros)]
    zeros = spread[1].contiguous() if format.has_zeros else None
    grid = int4_grid(group, dtype, zeros)
    scales = int4_grid(group, dtype).new_scales(spread[0].contiguous())
    codes = grid.codes(weight.double() / grid.spread(scales, weight.shape))
    g_idx = (torch.arange(size_in) // (format.group or size_in)).to(torch.int32)
    like = {"weight_shape": torch.tensor(weight.shape, dtype=torch.int32), "g_idx": g_idx}
    names = [*format.names(name), *format.optional_names(name)]
    optional = [like[each] for each in format.optional]
    tensors = [*format.write(Quantized(codes, scales, zeros))[: len(format.ends)], *optional]
    return dict(zip(names, tensors, strict=True)), grid.dense(codes, scales)


def to_int8(folder):
    """Store the experts of a checkpoint as compressed-tensors stores 8-bit integers."""
    stored = {}
    for name, weight in tensors_in(folder).items():
        if not re.search(EXPERTS, name):
            stored[name] = weight
            continue
        scales = (weight.float().unflatten(1, (-1, 32)).abs().amax(2) / 127).bfloat16()
        codes = (weight.float() / scales.float().repeat_interleave(32, 1)).round().clamp(-127, 127) + 128
        named = {"packed": as_words(codes.to(torch.uint8)), "scale": scales, "shape": torch.tensor(weight.shape)}
        stored |= {f"{name}_{kind}": tensor for kind, tensor in named.items()}
    rewrite(folder, stored)
    edit_config(folder, quantization_config=DECLARED["ct-8"])


def to_integers(folder, kind, part=None):
    """Store the matrices of a checkpoint as a kind that have this pattern in their names, by default experts and, where
    the kind does not ignore them, the attention; the dense checkpoint of their values then lies in "dense" beside it.
    Both sets of tensors."""
    torch.manual_seed(5)
    shutil.copytree(folder, folder.with_name("dense"))
    declared, format, tensors = DECLARED[kind], format_of(kind), tensors_in(folder)
    part = part or (LINEAR if "re:.*self_attn.*" not in declared.get("ignore", []) else EXPERTS)
    stored, dense = {}, dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and re.search(part, name):
            own, dense[name] = stored_as(format, name, tensor)
            stored |= own
        else:
            stored[name] = tensor
    if kind == "auto-round":
        stored = {name: tensor for name, tensor in stored.items() if not name.endswith("g_idx")}
    rewrite(folder, stored)
    rewrite(folder.with_name("dense"), dense)
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:  # Kimi K2.5's says it there
        edit_config(folder, text_config={**config["text_config"], "quantization_config": declared})
    else:
        edit_config(folder, quantization_config=declared)
    return stored, dense
