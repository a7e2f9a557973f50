"""Experts in 4-bit integers as the hub's checkpoints have them: taken as they are, bit for bit, with adapters beside
them, and written back byte by byte.

golden/integers.safetensors has a matrix in each form, made or read by the libraries themselves
(golden/make_integers.py). What is in whole checkpoints here is written by the inverse of our readers, which that file
holds to the bytes.
"""

import hashlib
from pathlib import Path

import pytest
import torch
import transformers
from helpers.adapters import with_lora
from helpers.checkpoints import config_in, edit_config, edit_tensors, make, packed_in, rewrite, same_bits, tensors_in
from helpers.integers import (
    AUTO_ROUND,
    AWQ,
    DECLARED,
    EXPERTS,
    GPTQ,
    compressed_config,
    format_of,
    stored_as,
    to_integers,
)
from helpers.marks import loads_matrices, rest_pinned
from helpers.models import ORDER_OF_SUMS, assert_all_close, batch, gradients_of
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

from sonicmoe_hf import CheckpointError, convert_checkpoint, from_pretrained, merge_adapter, quantize_experts
from sonicmoe_hf.checkpoints.reading.files import same_bytes
from sonicmoe_hf.formats.integer_matrices import Int4Matrix

GOLDEN = Path(__file__).with_name("golden") / "integers.safetensors"
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
KINDS = [kind for kind in DECLARED if kind not in ("ct-8", "mxfp4", "nvfp4")]
BATCH = batch(2, 8)
pytestmark = loads_matrices


def digest(values):
    return hashlib.sha256((values.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.pinned
@pytest.mark.parametrize("kind", [kind for kind in DECLARED if kind != "auto-round-awq"])
def test_every_matrix_of_the_libraries_is_read_as_they_do_and_written_back_byte_by_byte(kind):
    format = format_of(kind)
    with safe_open(GOLDEN, framework="pt") as golden:
        names = [*format.names("weight"), *format.optional_names("weight")]
        stored = [golden.get_tensor(f"{kind}.{name}") for name in names if f"{kind}.{name}" in golden.keys()]  # noqa: SIM118
        expected = golden.metadata()[kind]
    values = format.dense(*stored)
    # compressed-tensors computes FP4 in bf16
    assert digest(values.bfloat16() if kind in ("mxfp4", "nvfp4") else values) == expected
    if isinstance(format, Int4Matrix):
        back = format.write(format.read(*stored))
        assert len(back) >= len(format.ends) and all(map(same_bytes, back, stored))
        assert format.read(*stored).scales.dtype == stored[1].dtype


@pytest.mark.pinned
@pytest.mark.parametrize("size_in, group, held", [(704, 128, 64), (96, 128, 32), (256, 256, 128), (192, -1, 64)])
@pytest.mark.parametrize("kind", ["ct-128", "gptq-asym", "awq"])
def test_groups_that_a_row_or_a_format_does_not_take_are_held_as_several(kind, size_in, group, held):
    changes = {"group_size": group}
    if kind == "ct-128":
        changes = {"config_groups": compressed_config(group_size=group)["config_groups"]}
    format = format_of(kind, **changes)
    stored, values = stored_as(format, "weight", torch.randn(16, size_in))
    tensors = list(stored.values())
    matrix = format.read(*tensors)
    assert 2 * matrix.codes.shape[1] // matrix.scales.shape[1] == held
    assert torch.equal(format.dense(*tensors), values)
    assert all(map(same_bytes, format.write(matrix)[: len(format.ends)], tensors))


@pytest.mark.pinned
def test_a_zero_that_gptq_wrote_as_minus_one_or_wrapped_stands_for_16():
    format = format_of("gptq-asym")
    stored, _ = stored_as(format, "weight", torch.randn(8, 128))
    stored["qzeros"].fill_(-1)  # every nibble is 15, and stands for 16
    matrix = format.read(*stored.values())
    assert matrix.state.unique().tolist() == [16]
    assert same_bytes(format.write(matrix)[2], stored["qzeros"])


@pytest.mark.pinned
def test_a_piece_of_g_idx_as_a_rank_gets_it_shows_the_order_of_activations():
    in_order = torch.arange(256, dtype=torch.int32) // 64
    format_of("gptq-v2").check_stretches(in_order[:128], in_order[100:228], in_order[130:150])
    for other in (in_order.flip(0), in_order[torch.randperm(256)], torch.arange(256) // 32):
        with pytest.raises(CheckpointError, match="desc_act"):
            format_of("gptq-v2").check_stretches(in_order, other[:128])


@pytest.mark.parametrize("kind", rest_pinned(KINDS, 2))
def test_a_checkpoint_is_taken_bit_for_bit_and_trains_as_the_dense_one_of_its_values(kind, tmp_path):
    make(tmp_path / "packed", "qwen3_moe", **SIZES)
    stored, dense = to_integers(tmp_path / "packed", kind)
    model, info = from_pretrained(
        tmp_path / "packed", experts_quantization="int4", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    format = format_of(kind)
    assert len(packed_in(model)) == 4 and {weight.format for weight in packed_in(model).values()} == {format.name}
    scales = {tensor.dtype for name, tensor in stored.items() if name.endswith(("weight_scale", "scales"))}
    assert {weight.scales.dtype for weight in packed_in(model).values()} == scales
    for name, weight in packed_in(model).items():
        layer, _, projection = name.rpartition(".")
        wanted = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[projection]
        for expert, values in enumerate(weight.dequantize(torch.float32)):
            assert torch.equal(values, torch.cat([dense[f"{layer}.{expert}.{part}.weight"] for part in wanted]))
    state = model.state_dict()
    assert all(torch.equal(state[name], dense[name].float()) for name in dense if ".experts." not in name)
    twin = from_pretrained(tmp_path / "dense", dtype=torch.float32)
    expected = twin(**BATCH).logits
    assert (model(**BATCH).logits - expected).norm() <= 1e-6 * expected.norm()  # the order of sums in fp32
    model.save_pretrained(tmp_path / "saved")
    assert config_in(tmp_path / "saved")["quantization_config"]["experts"] == format.name
    assert same_bits(from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict(), state)
    for each in (model, twin):
        with_lora(each, target_modules=["o_proj"]).train()(**BATCH).loss.backward()
    assert len(gradients_of(model)) >= 6
    assert_all_close(gradients_of(model), gradients_of(twin), 1e-5, ORDER_OF_SUMS)


def test_deepseek_v3s_experts_are_packed_alone_and_linear_layers_in_nf4_on_request(tmp_path):
    pytest.importorskip("bitsandbytes")
    make(tmp_path / "packed", "deepseek_v3", **SIZES)
    to_integers(tmp_path / "packed", "ct-32")
    plain = from_pretrained(tmp_path / "packed", experts_quantization="int4", dtype=torch.bfloat16)
    assert len(packed_in(plain)) == 2
    linear = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = from_pretrained(
        tmp_path / "packed", experts_quantization="int4", dtype=torch.bfloat16, quantization_config=linear
    )
    assert type(model.model.layers[1].self_attn.o_proj).__name__ == "Linear4bit"
    for name, weight in packed_in(plain).items():
        assert all(map(same_bytes, weight.packed[:2], packed_in(model)[name].packed[:2]))
    found, expected = model(**BATCH).logits, plain(**BATCH).logits
    assert (
        0 < (found - expected).norm() < 0.5 * expected.norm()
    )  # NF4's 9% of each linear weight, and experts chosen by them
    model.save_pretrained(tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert torch.equal(again(**BATCH).logits, found)


def test_packed_attention_becomes_nf4_on_request(tmp_path):
    pytest.importorskip("bitsandbytes")
    make(tmp_path / "packed", "qwen3_moe", **SIZES)
    to_integers(tmp_path / "packed", "gptq")
    linear = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    models = [
        from_pretrained(folder, dtype=torch.bfloat16, quantization_config=linear, experts_quantization="int4")
        for folder in (tmp_path / "packed", tmp_path / "dense")
    ]
    ours, theirs = (model.model.layers[0].self_attn.q_proj.weight for model in models)
    assert same_bytes(ours.data, theirs.data)


@pytest.mark.parametrize("kind, wanted", rest_pinned([("ct-8", "int4"), ("ct-8", "nf4")]))
def test_eight_bits_become_four_while_they_stream_in_and_stay_no_format_of_their_own(kind, wanted, tmp_path):
    make(tmp_path / "packed", "qwen3_moe", **SIZES)
    format, tensors = format_of(kind), tensors_in(tmp_path / "packed")
    stored, dense = {}, {}
    for name, tensor in tensors.items():
        stored[name] = dense[name] = tensor
        if ".experts." in name:
            groups = tensor.float().unflatten(1, (-1, 32))
            scales = (groups.abs().amax(2) / 127.5).bfloat16()
            codes = (groups / scales.float()[..., None]).round().clamp(-128, 127)
            dense[name] = (codes * scales.float()[..., None]).flatten(1)
            words = (codes.flatten(1) + 128).to(torch.uint8).view(torch.int32)
            del stored[name]
            stored |= dict(zip(format.names(name), (words, scales)))
            assert torch.equal(format.dense(words, scales), dense[name])
    make(tmp_path / "dense", "qwen3_moe", **SIZES)
    rewrite(tmp_path / "dense", dense)
    rewrite(tmp_path / "packed", stored)
    edit_config(tmp_path / "packed", quantization_config=DECLARED[kind])
    model = from_pretrained(tmp_path / "packed", experts_quantization=wanted, dtype=torch.float32)
    expected = quantize_experts(from_pretrained(tmp_path / "dense", dtype=torch.float32), wanted)
    assert same_bits(model.state_dict(), expected.state_dict())
    with pytest.raises(ValueError, match=r"'fp8', but the checkpoint is quantized already \(int8\); load the bf16"):
        from_pretrained(tmp_path / "packed", experts_quantization="fp8")
    edit_tensors(tmp_path / "packed", lambda tensors: tensors[f"{LAYER}.weight_scale"].fill_(float("inf")))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight of expert 3: .* NaN or infinite"):
        from_pretrained(tmp_path / "packed", experts_quantization=wanted)


def small_kimi():
    common = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = transformers.DeepseekV3Config(
        **common, num_key_value_heads=4, intermediate_size=64, moe_intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=32,
        kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    vision = {
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "patch_size": 14,
    }
    return transformers.Kimi_K25Config(
        text_config=text.to_dict(), vision_config=vision, projection_hidden_size=64, image_token_id=120,
        video_token_id=121, vision_start_token_id=122, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.mark.skipif(not hasattr(transformers, "Kimi_K25Config"), reason="Transformers has no Kimi K2.5 yet")
def test_kimi_k25s_experts_stay_in_int4_and_its_tower_is_the_checkpoints(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(small_kimi(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "packed")
    # Transformers saves the language layers as blocks, which the hub's are not
    hubs = {name.replace(".model.blocks.", ".model.layers."): t for name, t in tensors_in(tmp_path / "packed").items()}
    rewrite(tmp_path / "packed", hubs)
    _, dense = to_integers(tmp_path / "packed", "ct-32")
    found, info = from_pretrained(tmp_path / "packed", experts_quantization="int4", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = found.state_dict()
    others = {n.replace("language_model.model.", "model.language_model."): t for n, t in model.state_dict().items()}
    tower = [name for name in others if "vision" in name or "projector" in name]
    assert tower and all(torch.equal(state[name], others[name]) for name in tower)
    (gate_up,) = (weight for name, weight in packed_in(found).items() if "gate_up" in name)
    expert = "language_model.model.layers.1.mlp.experts.2"
    expected = torch.cat([dense[f"{expert}.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(gate_up.dequantize(torch.float32)[2], expected)
    found.save_pretrained(tmp_path / "saved")
    saved = config_in(tmp_path / "saved")
    assert saved["quantization_config"]["experts"] == "int4" and "quantization_config" not in saved["text_config"]
    again = from_pretrained(tmp_path / "saved", auto_class=AutoModelForImageTextToText)
    assert same_bits(again.state_dict(), state)


REFUSED = {
    "bits": ({**GPTQ, "bits": 8}, r"gptq in 8 bits"),
    "bits of compressed-tensors": (compressed_config(num_bits=3), r"compressed-tensors in 3 bits"),
    "activations": (
        compressed_config() | {"config_groups": {"0": {"targets": ["Linear"], "input_activations": {"num_bits": 8}}}},
        "with activations quantized too",
    ),
    "order of activations": (compressed_config(actorder="group"), "in the order of activations"),
    "another form": (compressed_config("int-quantized"), "compressed-tensors as 'int-quantized'"),
    "a scale a tensor": (compressed_config(strategy="tensor"), "with scales for each tensor"),
    "no experts": ({**compressed_config(), "ignore": ["re:.*experts.*"]}, "with experts left out"),
    "targets": (compressed_config(targets=["re:.*self_attn.*"]), r"by the targets \['re:\.\*self_attn\.\*'\]"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "gptq as 'marlin'"),
    "awq's other kernels": ({**AWQ, "version": "gemv"}, "awq for its kernel 'gemv'"),
    "auto-round's other packings": ({**AUTO_ROUND, "packing_format": "auto_round:fp8"}, "'auto_round:fp8'"),
    "groups": ({**GPTQ, "group_size": 0}, "in groups of 0"),
}


@pytest.mark.pinned
@pytest.mark.parametrize("declared, match", REFUSED.values(), ids=list(REFUSED))
def test_other_integers_are_refused_by_name_with_a_remedy_that_works(declared, match, tmp_path):
    make(tmp_path, "qwen3_moe", **SIZES)
    edit_config(tmp_path, quantization_config=declared)
    with pytest.raises(CheckpointError, match=rf'{match}.*, which is not read: .*experts_quantization="int4"'):
        from_pretrained(tmp_path, experts_quantization="int4")
    edit_config(tmp_path, quantization_config=None)  # the bf16 checkpoint
    assert packed_in(from_pretrained(tmp_path, experts_quantization="int4"))


@pytest.mark.parametrize("target", [r"re:.*\.block_sparse_moe\.", "re:.*feed_forward.*", "re:.*mixer.*", "re:.*w1"])
def test_experts_are_told_by_the_names_of_any_model(target):
    assert vars(format_of("ct-32", **compressed_config(targets=[target]))) == vars(format_of("ct-32"))
    with pytest.raises(CheckpointError, match="with experts left out"):
        format_of("ct-32", ignore=[target])


LAYER = "model.layers.1.mlp.experts.3.up_proj"


@pytest.mark.pinned
@pytest.mark.parametrize(
    "kind, change, match",
    [
        ("gptq", {f"{LAYER}.scales": None}, r"of 8 experts the checkpoint has 8 \.qweight, 7 \.scales"),
        ("gptq", lambda t: t[f"{LAYER}.g_idx"].copy_(torch.arange(128) % 2), "desc_act.*load the bf16"),
        ("gptq", lambda t: t[f"{LAYER}.qzeros"].zero_(), "declared symmetric.*set sym to false"),
        (
            "gptq",
            lambda t: t[f"{LAYER}.scales"].fill_(float("inf")),
            "gate_up_proj_scale has NaN or infinite .* expert 3",
        ),
        ("ct-32", {f"{LAYER}.weight_scale": torch.ones(64, 5)}, r"of expert 3: weight_scale is .* \(64, 5\)"),
        ("ct-32", lambda t: t[f"{LAYER}.weight_shape"].fill_(7), r"weight_shape is \[7, 7\]"),
        ("gptq", {"model.layers.0.self_attn.o_proj.scales": None}, "o_proj.weight is .* with 1 of 2 scales"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_named(kind, change, match, tmp_path):
    make(tmp_path / "packed", "qwen3_moe", **SIZES)
    to_integers(tmp_path / "packed", kind)
    edit_tensors(tmp_path / "packed", change)
    with pytest.raises(CheckpointError, match=match):
        from_pretrained(tmp_path / "packed", experts_quantization="int4")


@pytest.mark.parametrize(
    "kind, suffix, method", [("gptq", "qweight", "gptq"), ("ct-32", "weight_packed", "compressed-tensors")]
)
def test_a_config_without_the_tensors_and_tensors_without_the_config_are_errors(kind, suffix, method, tmp_path):
    make(tmp_path / "packed", "qwen3_moe", **SIZES)
    to_integers(tmp_path / "packed", kind)
    edit_config(tmp_path / "dense", quantization_config=DECLARED[kind])
    with pytest.raises(CheckpointError, match=rf"no weight is in it .*{suffix}\); remove quantization_config"):
        from_pretrained(tmp_path / "dense", experts_quantization="int4")
    edit_config(tmp_path / "packed", quantization_config=None)
    for options in ({}, {"experts_quantization": "int4"}):
        with pytest.raises(
            CheckpointError,
            match=rf'{suffix} in .* is packed in integers, but .*add quantization_config .*"quant_method": "{method}"',
        ):
            from_pretrained(tmp_path / "packed", **options)


@pytest.mark.parametrize("kind", rest_pinned(["gptq", "awq", "auto-round", "ct-asym"]))
def test_without_a_format_the_remedy_is_named(kind, tmp_path):
    """Transformers would leave experts random, or raise what names nothing."""
    make(tmp_path / "packed", "qwen3_moe", **SIZES)
    to_integers(tmp_path / "packed", kind)
    with pytest.raises(ValueError, match=r'INT4 experts: .*experts_quantization="int4"'):
        from_pretrained(tmp_path / "packed")


@pytest.mark.parametrize("kind", rest_pinned(["ct-32", "gptq", "awq"]))
def test_a_model_on_the_meta_device_and_in_host_memory_has_the_same_weights(kind, tmp_path):
    make(tmp_path / "packed", "qwen3_moe", **SIZES)
    to_integers(tmp_path / "packed", kind)
    options = {"experts_quantization": "int4", "dtype": torch.bfloat16}
    meta = from_pretrained(tmp_path / "packed", **options, device_map="meta")
    assert packed_in(meta) and {parameter.device.type for parameter in meta.parameters()} == {"meta"}
    resident = from_pretrained(tmp_path / "packed", **options)
    streamed = from_pretrained(tmp_path / "packed", **options, experts_memory=0)
    assert same_bits(streamed.state_dict(), resident.state_dict())
    assert torch.equal(streamed(**BATCH).logits, resident(**BATCH).logits)


@pytest.mark.parametrize("kind", rest_pinned(["ct-32", "gptq-asym"]))
def test_what_save_pretrained_wrote_of_them_is_merged_and_converted(kind, tmp_path):
    make(tmp_path / "packed", "qwen3_moe", **SIZES)
    to_integers(tmp_path / "packed", kind)
    model = from_pretrained(tmp_path / "packed", experts_quantization="int4", dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    adapted = with_lora(model, target_modules=["o_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "saved", tmp_path / "adapter", tmp_path / "merged")
    merged, expected = (
        from_pretrained(tmp_path / "merged", dtype=torch.float32)(**BATCH).logits,
        adapted(**BATCH).logits,
    )
    assert (merged - expected).norm() <= 1e-5 * expected.norm()
    convert_checkpoint(tmp_path / "saved", tmp_path / "native", quantize=packed_in(model).popitem()[1].format)
    native, saved = (from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("native", "saved"))
    assert len(packed_in(native)) == 4
    assert (native(**BATCH).logits - saved(**BATCH).logits).norm() <= 1e-6 * expected.norm()  # the order of sums


@pytest.mark.parametrize("kind", rest_pinned(["ct-128", "gptq-asym", "ct-32", "awq"]))
def test_what_save_pretrained_wrote_of_them_returns_to_the_hub_as_compressed_tensors(kind, tmp_path):
    make(tmp_path / "packed", "qwen3_moe", **SIZES | {"moe_intermediate_size": 192})  # 128 of these share no scale
    stored, _ = to_integers(tmp_path / "packed", kind, EXPERTS)
    model = from_pretrained(tmp_path / "packed", experts_quantization="int4", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    convert_checkpoint(tmp_path / "saved", tmp_path / "native", quantize="int4")
    for source in ("saved", "native"):
        convert_checkpoint(tmp_path / source, tmp_path / f"hub of {source}", "hub", quantize="int4", verify=True)
    again = tensors_in(tmp_path / "hub of saved")
    assert same_bits(again, tensors_in(tmp_path / "hub of native"))
    if kind == "ct-32":  # whose groups no size divides further
        assert same_bits({name: t.to(stored[name].dtype) for name, t in again.items()}, stored)
    declared = config_in(tmp_path / "hub of saved")["quantization_config"]
    assert declared["config_groups"]["group_0"]["weights"]["group_size"] == (32 if kind == "ct-32" else 64)
    assert "model.layers.0.mlp.gate" in declared["ignore"] and not any(
        ".experts." in each for each in declared["ignore"]
    )
    reloaded = from_pretrained(tmp_path / "hub of saved", experts_quantization="int4", dtype=torch.bfloat16)
    for name, weight in packed_in(reloaded).items():
        assert torch.equal(weight.dequantize(torch.float32), packed_in(model)[name].dequantize(torch.float32))
        assert weight.scales.dtype == packed_in(model)[name].scales.dtype
    assert torch.equal(reloaded(**BATCH).logits, model(**BATCH).logits)


def test_bf16_experts_are_packed_into_the_hubs_own_form_as_in_memory(tmp_path):
    make(tmp_path / "bf16", "deepseek_v3", **SIZES)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "hub", "hub", quantize="int4", verify=True)
    hub, memory = (from_pretrained(tmp_path / name, experts_quantization="int4") for name in ("hub", "bf16"))
    assert same_bits(hub.state_dict(), memory.state_dict())
    shapes = {tuple(t.tolist()) for name, t in tensors_in(tmp_path / "hub").items() if name.endswith("weight_shape")}
    assert shapes == {(64, 128), (128, 64)}
