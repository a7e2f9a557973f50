"""Models with packed experts: in memory, from and to checkpoints, with adapters, beside bitsandbytes, and over ranks."""

import copy
import json

import pytest
import torch
from helpers.adapters import EXPERTS, with_lora
from helpers.checkpoints import edit_config, make, packed_in, rewrite, tensors_in
from helpers.marks import crossed, rest_pinned, rest_slow
from helpers.memory import LiveBytes
from helpers.models import CONFIGS, OF_64, ON_DISK, batch, build, loss_and_gradients
from helpers.native import save_both
from helpers.trl_trainers import trl_trainer, word_tokenizer
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Mxfp4Config,
)
from trl import SFTConfig, SFTTrainer

from sonicmoe_hf import (
    CheckpointError,
    PackedWeight,
    UnsupportedExpertsError,
    UnsupportedModelError,
    from_pretrained,
    patch_model,
    quantize_experts,
)
from sonicmoe_hf.kernels.packed import FORMATS

BATCH = batch(2, 8)


def small(family, **changes):
    layers = {} if family == "nemotron_h" else {"num_hidden_layers": 2}
    return build(family, **{**OF_64[family], **layers, **changes})


def dequantized(model):
    """Copy a model with the dense weights that the packed ones stand for, in the order they are expanded to."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if isinstance(weight, PackedWeight):
                setattr(module, name, nn.Parameter(weight.dequantize(), requires_grad=False))
    return model


def logits(model):
    return model.train()(**BATCH).logits


@pytest.mark.parametrize("family, name", crossed(OF_64, FORMATS, everywhere=2))
def test_packed_while_they_stream_in_experts_are_those_packed_in_memory(family, name, tmp_path):
    model = small(family).bfloat16()
    model.save_pretrained(tmp_path / "hub")
    for folder in save_both(model, tmp_path) if family in CONFIGS else [tmp_path / "hub"]:
        streamed = from_pretrained(folder, experts_quantization=name)
        in_memory = quantize_experts(from_pretrained(folder), name)
        assert len(packed_in(streamed)) == len(packed_in(in_memory)) > 0
        parts = {FORMATS[name].parts_and_kinds(weight.packed) for weight in packed_in(streamed).values()}
        assert family != "nemotron_h" or parts == {(1, 1)}, "of no gate and no up"
        expected = logits(in_memory)
        assert torch.equal(logits(streamed), expected)
        # gpt-oss's dense weights are stored transposed, which changes the order of bf16 sums
        tolerance = 0.05 if family == "gpt_oss" and folder.name == "hub" else 0.0
        torch.testing.assert_close(logits(dequantized(streamed)), expected, rtol=tolerance, atol=tolerance)
        streamed.save_pretrained(tmp_path / f"{folder.name} {name}")
        again = from_pretrained(tmp_path / f"{folder.name} {name}")
        assert torch.equal(logits(again), expected)
        again.load_state_dict(in_memory.state_dict())


def test_a_model_built_from_the_same_config_object_is_not_declared_packed(tmp_path):
    packed = small("qwen3_moe")
    dense = AutoModelForCausalLM.from_config(packed.config)
    quantize_experts(packed, "mxfp4")
    assert packed.config is packed.model.config and packed.config.quantization_config.experts == "mxfp4"
    dense.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("name", FORMATS)
def test_the_memory_footprint_counts_the_bytes_that_are_stored(name):
    model = quantize_experts(small("gpt_oss").bfloat16(), name)
    tensors = [*model.state_dict().values(), *(b for n, b in model.named_buffers() if n not in model.state_dict())]
    stored = sum(tensor.nbytes for tensor in tensors)
    assert model.get_memory_footprint() == pytest.approx(stored, rel=1e-12), "fp64: bytes of an entry, times entries"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", rest_pinned(["qwen3_moe", "gpt_oss"]))
def test_pefts_adapters_train_on_packed_experts_as_on_the_dequantized(family, name):
    model = quantize_experts(small(family), name)
    patch_model(model)
    packed, dense = (
        loss_and_gradients(with_lora(base, target_modules=["q_proj"]), BATCH) for base in (model, dequantized(model))
    )
    assert set(packed) == set(dense) and len(packed) == 2 + 2 * 2 * 3  # logits, loss, A and B of three in two layers
    for key in dense:  # gpt-oss's dense weights are stored transposed: the same numbers summed in another order
        torch.testing.assert_close(packed[key], dense[key], rtol=1e-4, atol=1e-5)


def test_pefts_own_path_is_an_error():
    model = quantize_experts(small("qwen3_moe"))
    config = LoraConfig(r=2, target_parameters=EXPERTS, target_modules=["q_proj"], init_lora_weights=False)
    peft = get_peft_model(model, config)
    with pytest.raises(RuntimeError, match=r"aten\.(baddbmm|add).* takes a dense tensor.*patch_model"):
        peft(**BATCH)


def test_gpt_oss_is_taken_as_it_comes(tmp_path):
    make(tmp_path, "gpt_oss", "mxfp4")
    model = from_pretrained(tmp_path, experts_quantization="mxfp4")
    stored, state = tensors_in(tmp_path), model.state_dict()
    kept = [key for key in stored if key.endswith(("_blocks", "_scales"))]
    assert len(kept) == 8 and all(torch.equal(state[key], stored[key]) for key in kept)
    dense = from_pretrained(tmp_path, quantization_config=Mxfp4Config(dequantize=True))
    torch.testing.assert_close(logits(model), logits(dense), rtol=0.02, atol=0.02)  # bf16, other order of sums
    for key, weight in packed_in(model).items():
        assert torch.equal(weight.dequantize(), dense.get_parameter(key))


def test_a_model_is_dense_again_and_saved_under_the_hubs_names(tmp_path):
    model = small("qwen3_moe").bfloat16()
    model.save_pretrained(tmp_path / "hub")
    packed = from_pretrained(tmp_path / "hub", experts_quantization="nf4")
    expected = {key: weight.dequantize() for key, weight in packed_in(packed).items()}
    dense = packed.dequantize()
    assert packed_in(dense) == {} and all(torch.equal(dense.get_parameter(key), w) for key, w in expected.items())
    dense.requires_grad_(True)
    dense.save_pretrained(tmp_path / "again")
    assert tensors_in(tmp_path / "again").keys() == tensors_in(tmp_path / "hub").keys()


def test_offloading_is_refused(tmp_path):
    small("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="device_map puts modules on the CPU or the disk"):
        from_pretrained(tmp_path, experts_quantization="nf4", device_map=ON_DISK)
    assert packed_in(from_pretrained(tmp_path, experts_quantization="nf4", device_map={"": "cpu"}))


def test_bitsandbytes_quantizes_the_linear_layers_beside_packed_experts(tmp_path):
    from bitsandbytes.nn import Params4bit

    small("qwen3_moe").bfloat16().save_pretrained(tmp_path / "dense")
    linear = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = from_pretrained(tmp_path / "dense", experts_quantization="nf4", quantization_config=linear)
    assert len(packed_in(model)) == 4
    theirs = [key for key, weight in model.named_parameters() if isinstance(weight, Params4bit)]
    assert len(theirs) == 8 and all("self_attn" in key for key in theirs)
    expected = logits(model)
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(from_pretrained(tmp_path / "packed")), expected)


def test_linear_layers_that_lose_gradients_on_cpus_are_told_at_the_first_call(tmp_path, caplog):
    from bitsandbytes.nn import Linear4bit

    small("qwen3_moe").bfloat16().save_pretrained(tmp_path)
    linear = BitsAndBytesConfig(load_in_4bit=True)
    for lays_out_for_inference in (False, True):
        model = from_pretrained(tmp_path, experts_quantization="nf4", quantization_config=linear)
        for module in model.modules():
            if isinstance(module, Linear4bit):
                module.support_avx512bf16_for_cpu = lays_out_for_inference  # bitsandbytes asks the CPU
        for _ in range(2):
            logits(model)
        told = [message for message in caplog.messages if "pass no gradients on" in message]
        assert len(told) == lays_out_for_inference
    assert "leave quantization_config out" in told[0]
    model = from_pretrained(tmp_path, experts_quantization="nf4")  # as it says
    logits(model)
    assert caplog.messages.count(told[0]) == 1


def test_kbit_preparation_leaves_packed_experts_and_what_they_compute_in(tmp_path):
    model = quantize_experts(small("gpt_oss").bfloat16())
    patch_model(model)
    before = {key: weight.dequantize() for key, weight in packed_in(model).items()}
    prepare_model_for_kbit_training(model)
    assert {weight.dtype for key, weight in model.named_parameters() if key not in before} == {torch.float32}
    after = packed_in(model)
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert all(torch.equal(after[key].dequantize(), dense) for key, dense in before.items())
    assert logits(model).dtype == torch.float32


def test_trls_trainer_trains_adapters_on_packed_experts_and_resumes(tmp_path):
    small("qwen3_moe").bfloat16().save_pretrained(tmp_path / "dense")
    rows = [{"input_ids": row.tolist()} for row in batch(8, 16)["input_ids"]]
    config = {
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "bf16": True,
        "gradient_checkpointing": True,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    adapters = LoraConfig(r=4, target_parameters=EXPERTS)

    def train(resume):
        torch.manual_seed(0)
        model = from_pretrained(tmp_path / "dense", experts_quantization="mxfp4")
        words = word_tokenizer()
        trainer = trl_trainer(SFTTrainer, SFTConfig, model, rows, tmp_path, words, config=config, peft_config=adapters)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1") if resume else None)
        assert len(packed_in(trainer.model)) == 4
        return {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}

    straight, resumed = train(False), train(True)
    assert len(straight) == 8 and all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.pinned
@pytest.mark.parametrize("name", rest_slow(FORMATS, 1))
def test_loading_holds_the_result_and_one_weight_of_a_layer_as_the_checkpoint_has_it(name, tmp_path):
    experts, layers, expert = 64, 2, 2 * 64 * 64  # gate and up, the largest weight
    small("qwen3_moe", num_experts=experts, num_hidden_layers=layers).bfloat16().save_pretrained(tmp_path)
    with LiveBytes() as memory:
        model = from_pretrained(tmp_path, experts_quantization=name)
    result, largest = sum(weight.nbytes for weight in model.parameters()), 2 * experts * expert
    of_one_expert = 10 * 4 * expert  # in fp32, and what packing makes of it
    assert largest < memory.peak <= result + largest + of_one_expert
    bound = 0.51 if name == "fp8" else 0.35  # of bf16; NF4's 256-entry map counts
    assert sum(weight.nbytes for weight in packed_in(model).values()) < bound * layers * 1.5 * largest


@pytest.mark.parametrize(
    "source, asked, match",
    [
        ({"quant_method": "mxfp4"}, {}, r"'nf4', but the checkpoint is quantized already \(mxfp4\)"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            {"experts_quantization": "fp8"},
            r"quantized already \(nvfp4\)",
        ),
        ({"quant_method": "sonicmoe_hf", "experts": "mxfp4"}, {}, r"quantized already \(mxfp4\)"),
        (
            {"quant_method": "sonicmoe_hf", "experts": "nf4"},
            {"quantization_config": BitsAndBytesConfig()},
            "leave it out",
        ),
        (None, {"quantization_config": Mxfp4Config()}, "is a Mxfp4Config"),
        (None, {"experts_quantization": "int3"}, "experts_quantization is 'int3'; choose one of 'nf4', 'mxfp4'"),
    ],
)
def test_contradictions_are_refused(source, asked, match, tmp_path):
    small("qwen3_moe").save_pretrained(tmp_path)
    if source is not None:
        edit_config(tmp_path, quantization_config=source)
    with pytest.raises(ValueError, match=match):
        from_pretrained(tmp_path, **{"experts_quantization": "nf4", **asked})


def test_fp8_checkpoints_need_a_transformers_that_does_not_cast_them(tmp_path, monkeypatch):
    monkeypatch.setattr("sonicmoe_hf.patching.loading_packed.LOADS_MATRICES", False)
    small("qwen3_moe").save_pretrained(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match=r"install 5\.19 or newer, or convert"):
        from_pretrained(tmp_path, experts_quantization="fp8")


def test_sizes_that_a_format_does_not_take_are_refused_before_anything_changes(tmp_path):
    odd, model = small("qwen3_moe"), build("qwen3_moe")
    odd.model.layers[1].mlp.experts.gate_up_proj = nn.Parameter(torch.ones(8, 5, 64))
    model.save_pretrained(tmp_path)
    match = r"layers\.0\.mlp\.experts\.gate_up_proj: nf4 packs rows of a multiple of 64 values,.* 32 input features"
    for pack, words in (
        (lambda: quantize_experts(odd, "fp8"), r"layers\.1\.mlp\.experts\.gate_up_proj: .* 5 rows"),
        (lambda: quantize_experts(model, "nf4"), match),
        (lambda: from_pretrained(tmp_path, experts_quantization="nf4"), match),
    ):
        with pytest.raises(UnsupportedExpertsError, match=words):
            pack()
    assert packed_in(odd) == packed_in(model) == {}


def test_what_cannot_be_packed_is_refused():
    broken = small("qwen3_moe")
    nn.init.constant_(broken.model.layers[1].mlp.experts.down_proj, float("nan"))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(small("qwen3_moe").config)
    for model, error, words in (
        (quantize_experts(small("qwen3_moe"), "mxfp4"), ValueError, "quantized already"),
        (empty, UnsupportedExpertsError, "meta device"),
        (
            get_peft_model(small("qwen3_moe"), LoraConfig(target_modules=["q_proj"])),
            TypeError,
            "the Transformers model",
        ),
        (broken, ValueError, r"layers\.1\.mlp\.experts\.down_proj: the weight has NaN"),
    ):
        with pytest.raises(error, match=words):
            quantize_experts(model, "nf4")
    assert packed_in(broken) == {}


def test_what_an_interrupted_call_leaves_is_saved_as_packed_and_does_not_load(tmp_path, monkeypatch):
    model, quantize = small("qwen3_moe"), PackedWeight.quantize

    def interrupted(weight, *options):
        if weight is model.model.layers[1].mlp.experts.down_proj:
            raise torch.OutOfMemoryError("of the device")
        return quantize(weight, *options)

    monkeypatch.setattr(PackedWeight, "quantize", interrupted)
    with pytest.raises(torch.OutOfMemoryError):
        quantize_experts(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no model\.layers\.1\.mlp\.experts\.down_proj"):
        from_pretrained(tmp_path)


def test_experts_that_a_checkpoint_lacks_are_errors_of_packed_and_dense_ones(tmp_path):
    model = small("qwen3_moe").bfloat16()
    model.save_pretrained(tmp_path / "dense")
    quantize_experts(model, "fp8").save_pretrained(tmp_path / "packed")
    for name, options in (("dense", {"experts_quantization": "fp8"}), ("packed", {})):
        whole, last = tensors_in(tmp_path / name), ".layers.1.mlp.experts.7."
        fewer = {key: tensor for key, tensor in whole.items() if last not in key}
        if name == "packed":
            fewer = {key: tensor[:7].clone() if "down_proj" in key else tensor for key, tensor in whole.items()}
        without = {key: tensor for key, tensor in whole.items() if ".layers.1.mlp.experts" not in key}
        for tensors, match in (
            (fewer, r"down_proj has shape \(7, 64, 64\) in the checkpoint; the model's is \(8, 64, 64\)"),
            (without, r"the checkpoint has no model\.layers\.1\.mlp\.experts\.gate_up_proj"),
        ):
            rewrite(tmp_path / name, tensors)
            with pytest.raises(CheckpointError, match=match):
                from_pretrained(tmp_path / name, **options)
