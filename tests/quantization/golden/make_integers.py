"""Writes integers.safetensors: one matrix in each form in which checkpoints store integers, as the libraries themselves
make or read it, with digests of the values in fp32 that they give. It ran with compressed-tensors 0.20.0, whose
compressors made and read its forms, AutoAWQ 0.2.9 and GPTQModel 7.7.0, whose own functions read what this packs by
their layouts.

    python make_integers.py AUTOAWQ GPTQMODEL    # folders of their unpacked source archives; no build is needed
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import types
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

ROWS, COLUMNS = 24, 256
SHIFTS = torch.arange(0, 32, 4, dtype=torch.int64)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256((values.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def compressed(weight, format="pack-quantized", scale=torch.bfloat16, **options):
    """Compress and decompress by the library."""
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(format)
    groups = weight.unflatten(1, (-1, args.group_size))
    stored = {"weight": weight}
    of_all = {}
    if format == "nvfp4-pack-quantized":
        of_all = {"weight_global_scale": (448.0 * 6.0 / weight.abs().max()).reshape(1)}
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args, *of_all.values())
    stored |= {"weight_scale": scales if args.type == "float" else scales.to(scale), **of_all}
    if not args.symmetric:
        stored["weight_zero_point"] = zeros.to(torch.int8)
    packed = compressor.compress(stored, scheme)
    exact = {**packed} if args.type == "float" else {**packed, "weight_scale": packed["weight_scale"].float()}
    return packed, compressor.decompress(exact, scheme)["weight"]


def words(nibbles, dim):
    """Pack eight along `dim` to one int32, the first in the lowest bits."""
    summed = (nibbles.long().movedim(dim, -1).unflatten(-1, (-1, 8)) << SHIFTS).sum(-1)
    return torch.where(summed >= 2**31, summed - 2**32, summed).to(torch.int32).movedim(-1, dim).contiguous()


def gptqmodel_dequantize(folder, qweight, qzeros, scales, g_idx):
    """Call GPTQModel's own method, which expects gptq_v2's zeros."""
    tree = ast.parse(Path(folder, "gptqmodel/nn_modules/qlinear/__init__.py").read_text())
    wanted = [
        function
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
        for function in each.body
        if isinstance(function, ast.FunctionDef) and function.name in ("dequantize_weight", "_dequantize_from_codes")
    ]
    space = {
        "t": torch,
        "torch": torch,
        "_torch_right_shift": torch.bitwise_right_shift,
        "_torch_left_shift": torch.bitwise_left_shift,
    }
    exec(compile(ast.Module(wanted[:2], []), "gptqmodel", "exec"), space)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).unsqueeze(0)
    layer = types.SimpleNamespace(
        planar=False,
        bits=4,
        maxq=15,
        pack_factor=8,
        qzeros=qzeros,
        qweight=qweight,
        scales=scales,
        g_idx=g_idx,
        dequant_dtype=torch.int8,
        wf_unsqueeze_zero=shifts.unsqueeze(0),
        wf_unsqueeze_neg_one=shifts.unsqueeze(-1),
        in_features=g_idx.numel(),
        _init_wf_unsqueeze_buffers=lambda: None,
    )
    layer._dequantize_from_codes = lambda *args, **options: space["_dequantize_from_codes"](layer, *args, **options)
    return space["dequantize_weight"](layer)


def quantized(weight, group, is_symmetric, signed=False):
    """Compute codes, zeros and fp16 scales, and the exact values; signed: scales with the extreme's
    sign, as AutoRound's."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if is_symmetric:
        extreme = torch.where(high > -low, -high, -low) if signed else torch.maximum(high, -low)
        scales, zeros = (extreme / 8 if signed else extreme * 2 / 15).half(), torch.full(low.shape, 8)
    else:
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(1, 15)
    spread = [each.float().repeat_interleave(group, 1) for each in (scales, zeros)]
    codes = (weight / spread[0] + spread[1]).round().clamp(0, 15)
    return codes, zeros, scales, (codes - spread[1]) * spread[0]


def gptq(weight, folder, group, is_symmetric, offset, has_g_idx=True, signed=False):
    codes, zeros, scales, exact = quantized(weight, group, is_symmetric, signed)
    g_idx = (torch.arange(COLUMNS) // group).to(torch.int32)
    stored = {
        "qweight": words(codes.t(), 0),
        "scales": scales.t().contiguous(),
        "qzeros": words(zeros.t() - offset, 1),
        "g_idx": g_idx,
    }
    read = gptqmodel_dequantize(folder, stored["qweight"], words(zeros.t(), 1), stored["scales"], g_idx)
    assert torch.equal(read, exact.t().half())  # rounded once
    if not has_g_idx:
        del stored["g_idx"]
    return stored, exact


def awq(weight, folder, group):
    file = Path(folder, "awq/utils/packing_utils.py")
    spec = importlib.util.spec_from_file_location("packing_utils", file)
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    codes, zeros, scales, exact = quantized(weight, group, False)
    ordered = [each.t().contiguous().unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1) for each in (codes, zeros)]
    stored = {"qweight": words(ordered[0], 1), "scales": scales.t().contiguous(), "qzeros": words(ordered[1], 1)}
    read = library.dequantize_gemm(stored["qweight"], stored["qzeros"], stored["scales"], 4, group)
    assert torch.equal(read, exact.t().half())
    return stored, exact


def main(autoawq, gptqmodel):
    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS) * 0.05
    integers = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    floats = {"num_bits": 4, "type": "float", "symmetric": True}
    made = {
        "ct-32": compressed(weight, **integers, group_size=32),
        "ct-128": compressed(weight, **integers, group_size=128, scale=torch.float16),
        "ct-asym": compressed(weight, **{**integers, "symmetric": False}, group_size=32),
        "gptq": gptq(weight, gptqmodel, 128, True, 1),
        "gptq-asym": gptq(weight, gptqmodel, 128, False, 1),
        "gptq-v2": gptq(weight, gptqmodel, 64, False, 0),
        "auto-round": gptq(weight, gptqmodel, 128, True, 1, has_g_idx=False, signed=True),
        "auto-round-v2": gptq(weight, gptqmodel, 32, False, 0, has_g_idx=False),
        "awq": awq(weight, autoawq, 128),
        "ct-8": compressed(weight, **{**integers, "num_bits": 8}, group_size=32),
        "mxfp4": compressed(weight, "mxfp4-pack-quantized", **floats, strategy="group", group_size=32),
        "nvfp4": compressed(weight, "nvfp4-pack-quantized", **floats, strategy="tensor_group", group_size=16),
    }
    tensors = {
        f"{kind}.{name}": tensor.contiguous() for kind, (own, _) in made.items() for name, tensor in own.items()
    }
    digests = {kind: digest(values) for kind, (_, values) in made.items()}
    save_file(tensors, Path(__file__).with_name("integers.safetensors"), metadata=digests)


if __name__ == "__main__":
    main(*sys.argv[1:])
