"""Messages of checkpoints in formats that are not read: each is raised, and the bf16 checkpoint
is packed in its place."""

import shutil

import pytest
import torch
from helpers.adapters import adapt
from helpers.checkpoints import (
    DECLARED_FP8,
    DECLARED_NVFP4,
    edit_config,
    edit_tensors,
    load_whole,
    make,
    packed_in,
    to_fp8,
)
from helpers.integers import DECLARED, to_int8, to_integers
from helpers.marks import loads_matrices
from helpers.models import logits_of, relative_error
from helpers.said import says

from sonicmoe_hf import from_pretrained, merge_adapter, patch_model
from sonicmoe_hf.formats.declared import DeclaredQuantization
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.tools.cli.main import main

pytestmark = [pytest.mark.pinned, loads_matrices]
OF_128 = {"num_hidden_layers": 1, "hidden_size": 128, "moe_intermediate_size": 128}
FOUR_BITS = 0.4  # of each weight 10%, through a router's choices
LAYER = "model.layers.0.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16") / "base"
    make(folder, "qwen3_moe", dtype=torch.bfloat16, **OF_128)
    return folder


def mixed(folder):
    to_integers(folder, "gptq")
    edit_tensors(folder, lambda tensors: tensors[f"{LAYER}.g_idx"].copy_(torch.arange(128) % 2))


def in_groups_of_16(folder):
    """Say each group of 64 four times."""
    to_integers(folder, "gptq-v2")
    edit_config(folder, quantization_config={**DECLARED["gptq-v2"], "group_size": 16})

    def four_times(tensors):
        for name, tensor in tensors.items():
            if name.endswith((".scales", ".qzeros")):
                tensors[name] = tensor.repeat_interleave(4, 0)
            elif name.endswith(".g_idx"):
                tensors[name] = (torch.arange(len(tensor)) // 16).to(tensor)

    edit_tensors(folder, four_times)


def declares(**entries):
    return lambda folder: edit_config(folder, quantization_config=entries)


REFUSED = {  # the message, what makes it, and the format that is asked for
    "the columns of a group do not lie side by side": (mixed, "int4"),
    "values share a scale, which uint4 cannot hold: it takes groups of a multiple of 32": (in_groups_of_16, "int4"),
    "'NVFP4' in groups of 16 is what sonicmoe_hf reads": (
        declares(**{**DECLARED_NVFP4, "quant_algo": "W4A8"}),
        "nvfp4",
    ),
    "the checkpoint's FP8 has weight_block_size [64, 64]; experts_quantization takes": (
        declares(**{**DECLARED_FP8, "weight_block_size": [64, 64]}),
        "fp8",
    ),
    "the experts are in 'int8' (expert_dtype of config.json), not in 'fp8' or 'fp4'": (
        declares(**{**DECLARED_FP8, "expert_dtype": "int8"}),
        "fp8",
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_the_bf16_checkpoint_is_packed_in_the_place_of_what_is_not_read(words, bf16, tmp_path):
    change, format = REFUSED[words]
    shutil.copytree(bf16, tmp_path / "base")
    change(tmp_path / "base")
    with says(words, "load the bf16 checkpoint that it was made from"):
        from_pretrained(tmp_path / "base", experts_quantization=format)
    model = from_pretrained(bf16, experts_quantization=format)
    assert packed_in(model)
    assert relative_error(logits_of(model).float(), logits_of(load_whole(bf16)).float()) < FOUR_BITS


def test_experts_in_8_bit_integers_are_merged_into_bf16_or_from_it(bf16, tmp_path):
    shutil.copytree(bf16, tmp_path / "base")
    to_int8(tmp_path / "base")
    expected = logits_of(adapt(load_whole(bf16), tmp_path / "adapter")).float()

    def merge(base, to, **options):
        merge_adapter(base, tmp_path / "adapter", tmp_path / to, **options)
        return logits_of(from_pretrained(tmp_path / to, experts_quantization=options.get("quantize"))).float()

    with says("leave quantize='keep' (--quantize keep) out, so that all weights become bf16"):
        merge(tmp_path / "base", "kept", quantize="keep")
    with says("rounding twice loses more: convert the bf16 checkpoint"):
        merge(tmp_path / "base", "twice", quantize="int4")
    assert relative_error(merge(tmp_path / "base", "merged"), expected) < 0.15, "8 bits, and routers' choices"
    assert relative_error(merge(bf16, "int4", quantize="int4"), expected) < FOUR_BITS
    with says("no format here holds experts in 8-bit integers", 'where experts_quantization="int4" packs the experts'):
        DeclaredQuantization("compressed-tensors", DECLARED["ct-8"]).loadable_matrix_format().read()
    model = from_pretrained(bf16, experts_quantization="int4")
    assert {weight.format for weight in packed_in(model).values()} == {"int4"}


def test_experts_that_somebody_quantized_are_loaded_unquantized(bf16):
    model = load_whole(bf16)
    experts = next(find_layers(model)).experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)
    with says("its down_proj is stored as torch.int8, quantized", "load the model unquantized"):
        patch_model(model)
    patch_model(model := load_whole(bf16))
    assert relative_error(logits_of(model), logits_of(load_whole(bf16))) < 1e-5, "fp32: sums in another order"


def test_sizes_that_no_engine_reads_in_fp8_are_served_in_bf16(tmp_path):
    make(tmp_path / "base", "qwen3_moe", dtype=torch.float32, **{**OF_128, "hidden_size": 64})
    expected = logits_of(adapt(load_whole(tmp_path / "base"), tmp_path / "adapter"))
    folders = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    with says("of which not both are multiples of 128: Transformers takes other blocks", "; serve bf16"):
        merge_adapter(*folders, quantize="fp8")
    merge_adapter(*folders)
    assert relative_error(logits_of(load_whole(folders[2])), expected) < 1e-5, "fp32: sums in another order"


def test_a_checkpoint_that_engines_read_as_it_is_has_the_values_that_are_trained(bf16, tmp_path):
    shutil.copytree(bf16, tmp_path / "base")
    to_fp8(tmp_path / "base")
    with says("is fp8 already, and engines read it so; serve it as it is"):
        assert main(["convert", str(tmp_path / "base"), str(tmp_path / "x"), "--layout", "hub", "--round", "fp8"]) == 2
    trained = from_pretrained(tmp_path / "base", experts_quantization="fp8", dtype=torch.float32)
    served = load_whole(tmp_path / "dense")  # the values that its files stand for
    assert relative_error(logits_of(trained), logits_of(served)) < 1e-5, "fp32: sums in another order"


def test_doctor_takes_a_checkpoint_that_is_not_quantized_for_one_in_no_format_that_is_read(bf16, tmp_path):
    shutil.copytree(bf16, tmp_path / "base")
    edit_config(tmp_path / "base", quantization_config={"quant_method": "aqlm", "nbits_per_codebook": 16})
    with says("its experts would never reach sonicmoe_hf; use a checkpoint that is not quantized"):
        assert main(["doctor", str(tmp_path / "base")]) == 1
    assert main(["doctor", str(bf16)]) == 0


def test_doctor_says_how_experts_that_never_reach_sonicmoe_hf_are_loaded(bf16, tmp_path):
    shutil.copytree(bf16, tmp_path / "base")
    to_integers(tmp_path / "base", "gptq")
    with says(
        "its experts would never reach sonicmoe_hf", 'sonicmoe_hf.from_pretrained(..., experts_quantization="int4")'
    ):
        assert main(["doctor", str(tmp_path / "base")]) == 1
    assert packed_in(from_pretrained(tmp_path / "base", experts_quantization="int4"))
