"""Small checkpoints on disk, of every kind that conversion reads, and how tests compare them."""

import itertools
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers.models import build
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from sonicmoe_hf import PackedWeight, convert_checkpoint
from sonicmoe_hf.checkpoints.reading.files import same_bytes
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.tools.random_models import fill_tables

SHARDS = "30KB"  # small models in several files, so that a layer's experts lie in more than one
FAMILIES = ("qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
KINDS = {  # per family, how its weights can stand on disk
    "qwen3_moe": ("hub", "fused", "upstream"),
    "olmoe": ("hub", "fused", "upstream"),
    "deepseek_v3": ("hub", "fused", "upstream", "fp8"),
    "gpt_oss": ("hub", "upstream", "mxfp4"),
}
DECLARED_FP8 = {  # of DeepSeek's and Qwen's checkpoints
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
DECLARED_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.mlp.gate"]}
# 192 and 144: blocks of 128 that are cut off, in both of the experts' products
CUT_OFF = {"hidden_size": 144, "moe_intermediate_size": 192, "num_hidden_layers": 2}
FP8_BLOCK = (24, 10)  # divides neither 16 nor 32: the last blocks are cut off, as on DeepSeek's own kv_a_proj


def tensors_in(folder):
    """Read every tensor of a checkpoint."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def load_whole(folder, dtype=torch.float32):
    """Load the model of a checkpoint that has all of its weights and no others, in Transformers."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model


def packed_in(model):
    """Find a model's packed weights by name."""
    return {name: weight for name, weight in model.named_parameters() if isinstance(weight, PackedWeight)}


def config_in(folder):
    return json.loads((folder / "config.json").read_text())


def edit_config(folder, **changes):
    """Set entries of config.json; None removes one."""
    config = {**config_in(folder), **changes}
    kept = {key: value for key, value in config.items() if value is not None or key not in changes}
    (folder / "config.json").write_text(json.dumps(kept))


def rewrite(folder, tensors):
    """Replace a checkpoint's weights by these, in one file, or an adapter's."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        path.unlink()
    file = "adapter_model.safetensors" if (folder / "adapter_config.json").exists() else "model.safetensors"
    save_file(tensors, folder / file, metadata={"format": "pt"})


def edit_tensors(folder, changes):
    """Put these tensors into a checkpoint or an adapter, None to remove one, or have a function change those there."""
    tensors = tensors_in(folder)
    changes(tensors) if callable(changes) else tensors.update(changes)
    rewrite(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None})


def assert_conversion_refused(folder, match, *layout, error=ValueError, **options):
    """Check that conversion fails with one sentence, and leaves nothing beside the checkpoint."""
    target = folder.parent / "refused"
    with pytest.raises(error, match=match):
        convert_checkpoint(folder, target, *layout, **options)
    assert not target.exists()
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


def same_bits(ours, theirs):
    """Tell whether two sets of tensors have the same names, dtypes, shapes and bytes."""
    return ours.keys() == theirs.keys() and all(same_bytes(ours[name], theirs[name]) for name in ours)


def make(folder, family, kind="hub", dtype=torch.bfloat16, fp8_block=FP8_BLOCK, **changes):
    """Write a checkpoint of the family in `folder`; returns the model whose weights it holds,
    as far as rounding allows."""
    if kind == "mxfp4":
        changes = {"intermediate_size": 32, **changes}
    model = build(family, **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size=SHARDS, save_original_format=kind != "fused")
    if kind == "upstream":
        rewrite(folder, _as_upstream(tensors_in(folder), family))
    elif kind == "mxfp4":
        rewrite(folder, _as_mxfp4(tensors_in(folder)))
        edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    elif kind == "fp8":
        rewrite(folder, in_fp8(tensors_in(folder), size=fp8_block)[0])
        declared = {"quant_method": "fp8", "weight_block_size": list(fp8_block), "activation_scheme": "dynamic"}
        edit_config(folder, quantization_config=declared)
    return model


def _interleaved(gate, up):
    return torch.stack([gate, up], dim=1).flatten(0, 1)


def _as_upstream(tensors, family):
    """Make the names and row order of SonicMoE's own MoE module, spelled out apart from the package's own table."""
    renamed, experts = {}, {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.mlp)\.experts\.(?:(\d+)\.)?(\w+?)(?:\.weight)?", name)
        if match and match[3] != "c_fc":
            experts.setdefault(match[1], {})[match[2], match[3]] = tensor
        else:
            renamed[re.sub(r"\.mlp\.(gate|router)\.(weight|bias|e_score\w+)$", r".mlp.router.\2", name)] = tensor
    for block, found in experts.items():
        if family == "gpt_oss":
            renamed[f"{block}.c_fc.weight"] = found[None, "gate_up_proj"].transpose(1, 2).contiguous()
            renamed[f"{block}.c_proj.weight"] = found[None, "down_proj"].transpose(1, 2).contiguous()
            renamed[f"{block}.c_fc.bias"] = found[None, "gate_up_proj_bias"]
            renamed[f"{block}.c_proj.bias"] = found[None, "down_proj_bias"]
        else:
            ids = sorted({expert for expert, _ in found}, key=int)
            pairs = [_interleaved(found[e, "gate_proj"], found[e, "up_proj"]) for e in ids]
            renamed[f"{block}.c_fc.weight"] = torch.stack(pairs)
            renamed[f"{block}.c_proj.weight"] = torch.stack([found[e, "down_proj"] for e in ids])
    return renamed


def _as_mxfp4(tensors):
    """Pack in gpt-oss's format: per 32 values along the input dimension a power of two, and 4-bit values two to a
    byte."""
    packed = {}
    for name, tensor in tensors.items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            packed[name] = tensor
            continue
        groups = tensor.float().transpose(1, 2).unflatten(-1, (-1, 32))  # [E, out, in / 32, 32]
        exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
        table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        scaled = groups / torch.exp2(exponent).unsqueeze(-1)
        code = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1) + 8 * (scaled < 0)
        packed[f"{name}_blocks"] = (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8)
        packed[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
    return packed


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def as_nvfp4(tensors):
    """Compute (what ModelOpt would store, the values that its dequantize would give), by its formulas."""
    stored, values = {}, {}
    for name, tensor in tensors.items():
        values[name] = tensor
        if "_proj.weight" not in name:
            stored[name] = tensor
            continue
        blocks = tensor.float().unflatten(-1, (-1, 16))
        scale_2 = tensor.float().abs().amax() / (6.0 * 448.0)
        scale = (blocks.abs().amax(-1) / (6.0 * scale_2)).to(torch.float8_e4m3fn)
        factor = (scale.float() * scale_2).unsqueeze(-1)
        codes = ((blocks / factor).unsqueeze(-1) - E2M1).abs().argmin(-1).flatten(-2).to(torch.uint8)
        values[name] = (E2M1[codes.long()].unflatten(-1, (-1, 16)) * factor).flatten(-2).bfloat16()
        module = name.removesuffix(".weight")
        stored |= {
            name: codes[..., 1::2] << 4 | codes[..., 0::2],
            f"{name}_scale": scale,
            f"{name}_scale_2": scale_2,
            f"{module}.input_scale": torch.tensor(0.01),
        }
        if module.endswith("k_proj"):
            stored[f"{module}.k_scale"] = torch.tensor(1.0)
    return stored, values


def fp8_by_transformers(weight, block):
    """Quantize by Transformers' own fp8 quantizer: (weight, scale_inv)."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    quantizer = Fp8Quantize(
        SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt=None))
    )
    made = quantizer.convert({"x.weight": weight})
    return made["x.weight"], made["x.weight_scale_inv"]


def fp8_of(tensor, kind, size=(128, 128)):
    """Quantize to (values, scale_inv, what they stand for), block by block of this size, as
    DeepSeek's kernels have it."""
    blocks = tuple(-(-length // of_block) for length, of_block in zip(tensor.shape, size))
    values, scales = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(blocks)
    dense = torch.empty(tensor.shape)
    for place in itertools.product(*map(range, blocks)):
        block = tuple(slice(i * of_block, (i + 1) * of_block) for i, of_block in zip(place, size))
        scales[place] = tensor[block].float().abs().max() / 448
        if kind == "ue8m0":
            scales[place] = torch.exp2(scales[place].log2().ceil())
        elif kind == "bf16":
            scales[place] = scales[place].bfloat16() * 1.01  # rounded up
            scales[place] = scales[place].bfloat16()
        values[block] = (tensor[block].float() / scales[place]).to(torch.float8_e4m3fn)
        dense[block] = values[block].float() * scales[place]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "ue8m0": torch.float8_e8m0fnu}[kind]
    return values, scales.to(dtype), dense


def to_fp8(folder, kind="fp32", part="", **declared):
    """Store the matrices of a checkpoint in FP8 that have this part in their names; the dense checkpoint that it stands
    for then lies in the folder "dense" beside it. Both sets of tensors."""
    shutil.copytree(folder, folder.with_name("dense"))
    tensors = tensors_in(folder)
    chosen = {name: tensor for name, tensor in tensors.items() if part in name}
    stored, dense = ({**tensors, **each} for each in in_fp8(chosen, kind))
    rewrite(folder, stored)
    rewrite(folder.with_name("dense"), dense)
    edit_config(folder, quantization_config={**DECLARED_FP8, **declared})
    return stored, dense


def to_nvfp4(folder):
    """Store a checkpoint as ModelOpt does: its tensors, and the values that they stand for."""
    stored, values = as_nvfp4(tensors_in(folder))
    rewrite(folder, stored)
    edit_config(folder, quantization_config=DECLARED_NVFP4)
    return stored, values


def in_fp8(tensors, kind="fp32", size=(128, 128)):
    """Compute (a checkpoint's tensors in FP8, the dense ones that they stand for), linear layers and experts."""
    stored, dense = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "_proj" in name:
            stored[name], stored[f"{name}_scale_inv"], dense[name] = fp8_of(tensor, kind, size)
    return stored, dense


def in_fp4(tensors):
    """Make (a DeepSeek-V4 checkpoint's tensors, experts in FP4 and linear layers in FP8, the dense ones that they
    stand for)."""
    stored, dense = dict(tensors), dict(tensors)
    dequantize = Fp8Dequantize(None)._dequantize_one
    for name, tensor in tensors.items():
        place = name.removesuffix(".weight")
        if ".experts." in name:
            packed = FORMATS["mxfp4"].quantize(tensor[None])
            stored[name] = packed.codes[0].flatten(1).view(torch.int8)
            stored[f"{place}.scale"] = packed.scales[0].view(torch.float8_e8m0fnu)
            dense[name] = dequantize(stored[name], stored[f"{place}.scale"], torch.float32)
        elif name.split(".")[-2].startswith("w") and "compressor" not in name:
            stored[name], stored[f"{place}.scale"], dense[name] = fp8_of(tensor, "ue8m0")
    return stored, dense


def make_deepseek_v4(folder):
    """Write a small DeepSeek-V4 checkpoint as the hub's are, and the dense one that it stands for; return their
    folders."""
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=64, hidden_size=96, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        n_routed_experts=4, num_experts_per_tok=2, head_dim=32, qk_rope_head_dim=16, q_lora_rank=32, o_lora_rank=32,
        o_groups=2, index_n_heads=2, index_head_dim=32, max_position_embeddings=64, sliding_window=16,
        mlp_layer_types=["hash_moe", "moe"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    fill_tables(model)
    for name in ("fp4", "dense"):
        model.save_pretrained(folder / name)
    stored, dense = in_fp4(tensors_in(folder / "fp4"))
    rewrite(folder / "fp4", stored)
    rewrite(folder / "dense", dense)
    edit_config(folder / "fp4", quantization_config={**DECLARED_FP8, "scale_fmt": "ue8m0"}, expert_dtype="fp4")
    return folder / "fp4", folder / "dense"
