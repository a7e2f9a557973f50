"""`sonicmoe-hf warmup` fills the Hopper kernels' cache, without a GPU."""

import contextlib

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from sonicmoe_hf.checkpoints.reading import config_only
from sonicmoe_hf.tools.cli import doctor, warmup_kernels
from sonicmoe_hf.tools.cli.main import main

pytest.importorskip("cutlass")
pytest.importorskip("triton")

from sonicmoe_hf.kernels.hopper import cache
from sonicmoe_hf.kernels.hopper.config import PackedKind
from sonicmoe_hf.kernels.hopper.variants import on_triton
from sonicmoe_hf.kernels.interface import Activation

pytestmark = pytest.mark.pinned
BF16, NF4 = torch.bfloat16, PackedKind("nf4", "uint8", 64)


@pytest.mark.parametrize(
    ("H", "I", "refused"), [(256, 192, 0), (256, 40, 4), (256, 36, 4), (250, 192, 6), (64, 192, 6), (256, 20, 6)]
)
def test_sizes_decide_what_runs_on_triton(H, I, refused):
    assert len(on_triton(H, I, Activation())) == refused
    words = warmup_kernels.describe_kernels(H, I, Activation())
    assert ("every product runs on the Hopper kernels" in words) == (refused == 0)
    assert refused == 0 or "multiples of 8" in words


def test_without_a_gate_the_up_projection_is_no_wider_than_the_experts():
    """48 columns are too few, and so are the rows of their up projection, which with a gate are 96."""
    assert len(on_triton(128, 48, Activation())) == 4 and len(on_triton(128, 48, Activation("relu2"))) == 6


def test_packed_experts_need_kernels_that_decode_them_and_such_for_expanded_ones():
    """With adapters, whose rank is padded; no weight is trained."""
    kernels = warmup_kernels.LayerKind(256, 192, quantize="nf4", rank=12).kernels()
    counts = {weights: {name for name, parameters in kernels if parameters[0] == weights} for weights in (BF16, NF4)}
    assert counts[BF16] == counts[NF4] == {"gemm_up", "gemm_down", "gemm_down_backward"}
    assert all(16 in parameters for _, parameters in kernels)
    for kind in (("fp8", BF16), ("nf4", torch.float16)):
        others = warmup_kernels.LayerKind(256, 192, kind[1], quantize=kind[0], rank=8).kernels()
        assert {parameters[0] for _, parameters in others} == {kind[1]}


@pytest.mark.slow
def test_the_command_fills_the_cache_and_finds_it_filled(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = ["warmup", "--shape", "128,40", "--processes", "1"]
    assert main(command) == 1  # down and others run on Triton at I = 40
    first = capsys.readouterr().out
    assert "3 kernels" in first and "3 compiled now" in first and "down_backward" in first
    main(command)
    assert "0 compiled now" in capsys.readouterr().out


def test_the_command_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(
        warmup_kernels.backends, "missing_for_hopper", lambda: "nvidia-cutlass-dsl is not installed (pip ...)"
    )
    assert main(["warmup", "--shape", "2048,768"]) == 2
    assert "nvidia-cutlass-dsl is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ([], ["model", "--shape", "2048,768"]))
def test_the_command_wants_a_model_or_a_shape(capsys, arguments):
    assert main(["warmup", *arguments]) == 2
    assert "--shape H,I" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ("2048", "2048,many", "0,768"))
def test_the_command_refuses_other_shapes(capsys, shape):
    with pytest.raises(SystemExit) as exit, contextlib.redirect_stdout(None):
        main(["warmup", "--shape", shape])
    assert exit.value.code == 2 and "whole numbers" in capsys.readouterr().err


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}


def test_a_model_is_taken_apart_into_the_kinds_of_its_layers(tmp_path):
    config = transformers.GptOssConfig(**SMALL, hidden_size=96, intermediate_size=72, num_local_experts=4)
    config.save_pretrained(tmp_path)
    (kind,) = warmup_kernels.kinds_of_model(config_only.build_on_meta(str(tmp_path)), torch.float16)
    assert (kind.hidden, kind.inner, kind.layout, kind.bias) == (96, 72, "transposed_interleaved", True)
    assert (kind.activation.name, kind.activation.limit, kind.dtype) == ("clamped_swiglu", 7.0, torch.float16)
    assert "H=96 I=72" in str(kind) and "biases" in str(kind)


def test_native_experts_have_the_native_layout():
    config = AutoConfig.for_model(
        "sonicmoe_qwen3_moe", **SMALL, hidden_size=96, moe_intermediate_size=72, num_experts=4, head_dim=16
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (kind,) = warmup_kernels.kinds_of_model(model, torch.bfloat16)
    assert (kind.hidden, kind.inner, kind.layout, kind.bias) == (96, 72, "interleaved", False)


def test_doctor_says_what_runs_on_the_hopper_kernels(tmp_path):
    sizes = {"hidden_size": 96, "moe_intermediate_size": 36, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**SMALL, **sizes)
    config.save_pretrained(tmp_path)
    (layers,) = doctor.examine(str(tmp_path))["layers"]
    assert "H=96, I=36: up, down" in layers["kernels"] and "run on the Triton kernels" in layers["kernels"]
