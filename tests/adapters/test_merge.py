"""A merged checkpoint computes what base plus adapter do, in every layout; what is not plain LoRA is refused."""

import multiprocessing
import os
import shutil
import signal
from functools import partial

import pytest
import torch
from helpers.adapters import EXPERTS, NATIVE_EXPERTS, adapt
from helpers.checkpoints import FAMILIES, SHARDS, config_in, edit_tensors, load_whole, make, same_bits, tensors_in
from helpers.engine_adapters import edit_adapter_config, merge_by_peft
from helpers.marks import rest_pinned
from helpers.memory import bytes_in, peak_of_a_process, reads_peaks
from helpers.models import ORDER_OF_SUMS, assert_all_close, build, logits_of, relative_error
from helpers.small_families import adapted_names, small_model
from helpers.trl_trainers import word_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig

from sonicmoe_hf import CheckpointError, convert_adapter, convert_checkpoint, merge_adapter
from sonicmoe_hf.tools.cli.main import main

EVERYTHING = {
    "use_rslora": True,
    "rank_pattern": {r"layers\.1\..*gate_up_proj": 4, "o_proj": 1},
    "alpha_pattern": {"experts.down_proj": 3, "mlp.gate.weight": 1.5, "o_proj": 7},
    "modules_to_save": ["lm_head"],
}


def base_and_adapter(folder, family="qwen3_moe", parameters=EXPERTS, dtype=torch.float32, **options):
    """Make (base, adapter, where to merge them), and the base with the adapter in PEFT, in fp32."""
    make(folder / "base", family, dtype=dtype)
    adapted = adapt(load_whole(folder / "base"), folder / "adapter", parameters, **options)
    return (folder / "base", folder / "adapter", folder / "merged"), adapted


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_an_adapter_can_have_is_merged_as_peft_does(family, tmp_path):
    router = "mlp.router.weight" if family == "gpt_oss" else "mlp.gate.weight"
    biases = ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"] if family == "gpt_oss" else []
    folders, adapted = base_and_adapter(tmp_path, family, [*EXPERTS, *biases, router], **EVERYTHING)
    expected = logits_of(adapted)
    done = merge_adapter(*folders, max_shard_size=SHARDS, verify=True)
    assert done.shards > 1 and done.target_layout == done.source_layout
    assert relative_error(logits_of(load_whole(tmp_path / "merged")), expected) < 1e-5, ORDER_OF_SUMS
    assert relative_error(logits_of(load_whole(tmp_path / "base")), expected) > 0.05, "the adapter does something"
    merged, by_peft = tensors_in(tmp_path / "merged"), merge_by_peft(adapted, tmp_path / "by peft")
    assert_all_close(merged, by_peft, 1e-6, ORDER_OF_SUMS)
    assert config_in(tmp_path / "merged") == config_in(tmp_path / "base")


@pytest.mark.pinned
@pytest.mark.parametrize("parameters", [EXPERTS[:1], EXPERTS[1:], []], ids=["gate and up", "down", "attention only"])
def test_what_is_not_adapted_keeps_its_bits(parameters, tmp_path):
    folders, adapted = base_and_adapter(tmp_path, parameters=parameters)
    merge_adapter(*folders)
    base, merged = tensors_in(tmp_path / "base"), tensors_in(tmp_path / "merged")
    assert_all_close(merged, merge_by_peft(adapted, tmp_path / "by peft"), 1e-6, ORDER_OF_SUMS)
    changed = {name.split(".")[-2] for name in base if not torch.equal(base[name], merged[name])}
    experts = {"gate_up_proj": {"gate_proj", "up_proj"}, "down_proj": {"down_proj"}}
    assert changed == {"q_proj", "o_proj"}.union(*(experts[name.rpartition(".")[2]] for name in parameters))


@pytest.mark.parametrize("family", rest_pinned(["gpt_oss", "qwen3_moe"]))
def test_base_adapter_and_result_may_each_be_in_either_layout(family, tmp_path):
    make(tmp_path / "hub", family, dtype=torch.float32)
    convert_checkpoint(tmp_path / "hub", tmp_path / "native")
    expected = logits_of(adapt(load_whole(tmp_path / "native"), tmp_path / "native adapter", NATIVE_EXPERTS))
    convert_adapter(tmp_path / "native adapter", tmp_path / "hub adapter", "hub")
    ways = [(base, adapter) for base in ("hub", "native") for adapter in ("hub", "native")]
    for layout in ("hub", "native"):
        for base, adapter in ways:
            folder = tmp_path / f"{base} {adapter} {layout}"
            wanted = None if layout == base else layout  # None: the base's own
            merge_adapter(tmp_path / base, tmp_path / f"{adapter} adapter", folder, wanted)
        alike = [tensors_in(tmp_path / f"{base} {adapter} {layout}") for base, adapter in ways]
        assert all(same_bits(alike[0], other) for other in alike[1:])
        assert relative_error(logits_of(load_whole(folder)), expected) < 1e-5, ORDER_OF_SUMS


def test_an_adapted_head_beside_a_copy_of_the_bases_is_merged(tmp_path):
    make(tmp_path / "base", "qwen3_moe")
    config = LoraConfig(r=2, target_modules=["lm_head"], target_parameters=EXPERTS, init_lora_weights=False)
    adapted = get_peft_model(load_whole(tmp_path / "base"), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    copy = "base_model.model.lm_head.base_layer.weight"
    assert copy in tensors_in(tmp_path / "adapter"), "PEFT saves it where embeddings are adapted"
    expected = logits_of(adapted)
    convert_checkpoint(tmp_path / "base", tmp_path / "fp32", "hub", dtype="float32")
    merge_adapter(tmp_path / "fp32", tmp_path / "adapter", tmp_path / "merged")
    assert relative_error(logits_of(load_whole(tmp_path / "merged")), expected) < 1e-5, ORDER_OF_SUMS
    edit_tensors(tmp_path / "adapter", lambda tensors: tensors[copy].mul_(2))
    expected = logits_of(PeftModel.from_pretrained(load_whole(tmp_path / "base"), tmp_path / "adapter"))
    merge_adapter(tmp_path / "fp32", tmp_path / "adapter", tmp_path / "of another base")
    assert relative_error(logits_of(load_whole(tmp_path / "of another base")), expected) < 1e-5, ORDER_OF_SUMS


def test_a_bf16_base_is_rounded_once(tmp_path):
    folders, adapted = base_and_adapter(tmp_path, dtype=torch.bfloat16)
    merge_adapter(*folders)
    exact = merge_by_peft(adapted, tmp_path / "by peft")
    merged = tensors_in(tmp_path / "merged")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    for name, tensor in merged.items():
        differing = (tensor != exact[name].bfloat16()).float().mean()
        assert differing < 0.01, f"{name}: sums that lie between two bf16 values within fp32's rounding, and no others"


@pytest.mark.parametrize(
    "family, kind", rest_pinned([("deepseek_v3", "fp8"), ("gpt_oss", "mxfp4"), ("qwen3_moe", "fused")])
)
def test_every_kind_of_base_gives_what_its_hub_form_gives_under_its_own_names(family, kind, tmp_path):
    make(tmp_path / "source", family, kind)
    convert_checkpoint(tmp_path / "source", tmp_path / "hub", "hub")
    adapt(load_whole(tmp_path / "hub"), tmp_path / "adapter")
    done = merge_adapter(tmp_path / "source", tmp_path / "adapter", tmp_path / "merged")
    merge_adapter(tmp_path / "hub", tmp_path / "adapter", tmp_path / "merged hub")
    if kind == "fused":
        assert set(tensors_in(tmp_path / "merged")) == set(tensors_in(tmp_path / "source"))
        convert_checkpoint(tmp_path / "merged", tmp_path / "as hub", "hub")
        (tmp_path / "merged").rename(tmp_path / "fused")
        (tmp_path / "as hub").rename(tmp_path / "merged")
    assert same_bits(tensors_in(tmp_path / "merged"), tensors_in(tmp_path / "merged hub"))
    assert config_in(tmp_path / "merged") == config_in(tmp_path / "merged hub")
    assert any("bfloat16 now" in notice for notice in done.notices) == (kind != "fused")


@pytest.fixture
def folders(tmp_path):
    return base_and_adapter(tmp_path)[0]


def _merge_until_killed(base, adapter, dst, share):
    def kill(done, total):
        if done >= share * total:
            os.kill(os.getpid(), signal.SIGKILL)

    merge_adapter(base, adapter, dst, max_shard_size=SHARDS, on_progress=kill)


@pytest.mark.pinned
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_kill_leaves_nothing_half_written(folders):
    base, adapter, dst = folders
    for share in (0.01, 0.5, 1.0):
        arguments = (base, adapter, dst, share)
        process = multiprocessing.get_context("fork").Process(target=_merge_until_killed, args=arguments)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL and not dst.exists()
        assert (dst.parent / ".merged.converting").exists(), "it was killed in the middle"
    merge_adapter(*folders)
    assert sorted(path.name for path in dst.parent.iterdir()) == ["adapter", "base", "merged"]


@pytest.mark.pinned
@reads_peaks
def test_memory_is_that_of_a_shard_and_a_file_of_the_base(tmp_path):
    model = build("qwen3_moe", num_experts=128, hidden_size=256, moe_intermediate_size=256).bfloat16()
    model.save_pretrained(tmp_path / "base", max_shard_size="20MB")
    get_peft_model(model, LoraConfig(r=2, target_parameters=EXPERTS, init_lora_weights=False)).save_pretrained(
        tmp_path / "adapter"
    )
    merge = partial(merge_adapter, tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    peak = peak_of_a_process(merge)
    written = bytes_in(tmp_path / "merged")
    assert peak < 1.6 * written, "a shard, and a file of the base: a fifth of it; fp32 temporaries once took it twice"


LARGE = {  # 1.2 GB
    "vocab_size": 4096, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "moe_intermediate_size": 512, "intermediate_size": 2048, "n_routed_experts": 128, "num_experts_per_tok": 4,
}  # fmt: skip
SHARD = 200_000_000
HEADROOM = 150_000_000  # the model's modules and names, an expert's matrices in fp32, a layer's factors


@pytest.mark.slow
@reads_peaks
def test_memory_is_that_of_two_files_and_a_layers_adapter_and_not_of_the_model(tmp_path):
    with torch.device("meta"):  # random values take longer than the merge
        model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**LARGE), dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for weight in model.state_dict().values():
        weight.fill_(0.01)
    model.save_pretrained(tmp_path / "base", max_shard_size=SHARD)
    modules, parameters = adapted_names(model)
    config = LoraConfig(r=8, target_modules=modules, target_parameters=parameters, init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    del model
    merge = partial(merge_adapter, tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", max_shard_size=SHARD)
    peak = peak_of_a_process(merge)
    assert bytes_in(tmp_path / "merged") > 1.2e9 and peak < 2 * SHARD + HEADROOM, f"{peak / 1e6:.0f} MB"


def assert_refused(folders, match):
    with pytest.raises(CheckpointError, match=match):
        merge_adapter(*folders)
    assert not folders[2].exists()


@pytest.mark.pinned
@pytest.mark.parametrize(
    "changes, match",
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, r"use_dora is True, which is not plain LoRA; merge it with PEFT: .*merge_and_unload\(\)"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"some_later_option": 3}, "some_later_option is 3"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"r": 3}, "are expected for r = 3"),
        ({"lora_alpha": None}, "lora_alpha is None, where a number above 0 is expected"),
        ({"target_parameters": [EXPERTS[0], NATIVE_EXPERTS[1]]}, "name experts of both layouts"),
        ({"target_parameters": EXPERTS[:1]}, "adapts nothing .* trained on .*, and this model is a Qwen3MoeFor"),
    ],
    ids=str,
)
def test_what_is_not_plain_lora_is_refused_with_its_name(folders, changes, match):
    edit_adapter_config(folders[1], **changes)
    assert_refused(folders, match)


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj."
DOWN_B = "base_model.model.model.layers.1.mlp.experts.lora_B.weight"


@pytest.mark.pinned
@pytest.mark.parametrize(
    "changes, match",
    [
        ({DOWN_B: torch.zeros(16, 32)}, r"have shapes \(16, 16\) and \(16, 32\), where \(16, 16\) and \(32, 16\) are"),
        ({DOWN_B: torch.full((32, 16), torch.nan)}, "NaN or infinite values"),
        ({DOWN_B: torch.ones(32, 16, dtype=torch.int8)}, r"adapter_model.safetensors: .* has dtype torch.int8"),
        ({DOWN_B: torch.ones(32, 16).to(torch.float8_e5m2)}, r"has dtype torch.float8_e5m2; weights are floats"),
        ({Q_PROJ + "lora_magnitude_vector": torch.zeros(32)}, "is neither lora_A nor lora_B of a layer"),
        ({Q_PROJ + "base_layer.lora_A.weight": torch.zeros(2, 32)}, "adapts nothing that the model has"),
        ({"base_model.model.lm_head.weight": torch.zeros(65, 32)}, "if the vocabulary was resized"),
        (
            {"base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight": torch.zeros(2, 32)},
            "for all experts and for single ones: the file mixes two forms",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value))[-40:],
)
def test_weights_that_do_not_fit_are_refused_with_their_names(folders, changes, match):
    edit_tensors(folders[1], changes)
    assert_refused(folders, match)


def test_factors_in_the_order_of_an_older_peft_are_named_with_its_version(folders):
    edit_tensors(folders[1], {DOWN_B: torch.zeros(16, 16), DOWN_B.replace("lora_B", "lora_A"): torch.zeros(16, 32)})
    edit_adapter_config(folders[1], peft_version="0.18.1")
    assert_refused(
        folders, r"PEFT up to 0.19.0 took out for in, and peft_version is '0.18.1': train the adapter with a"
    )


def test_a_sum_beyond_the_range_of_its_own_weights_dtype_is_refused(folders):
    up = "model.layers.1.mlp.experts.3.up_proj.weight"
    edit_tensors(folders[0], lambda tensors: tensors.update({up: tensors[up].half()}))
    gate_up_b = DOWN_B.replace("experts.", "experts.base_layer.")
    edit_tensors(folders[1], lambda tensors: tensors[gate_up_b].mul_(1e6))
    assert_refused(folders, f"{up} with the adapter added has .* infinite values in torch.float16")


def test_square_weights_are_merged_of_a_peft_that_takes_in_for_in_as_older_ones_may_not(tmp_path):
    folders, adapted = base_and_adapter(tmp_path, "olmoe", EXPERTS[:1])  # where 2I is H, as in OLMoE itself
    for version in ("0.19.0", None):
        edit_adapter_config(tmp_path / "adapter", peft_version=version)
        assert_refused(
            folders, "which do not show which side is the input's and which the output's; PEFT up to 0.19.0"
        )
    expected = logits_of(adapted)
    for version in ("0.19.1", "0.20.0", "1.0.dev0"):
        edit_adapter_config(tmp_path / "adapter", peft_version=version)
        merge_adapter(*folders[:2], tmp_path / version)
        assert relative_error(logits_of(load_whole(tmp_path / version)), expected) < 1e-5, ORDER_OF_SUMS


@pytest.mark.parametrize("layout", ["hub", "native"])
@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}],
    ids=lambda options: f"{next(iter(options))} {next(iter(options.values()))[0]}",
)
def test_head_and_embeddings_that_are_tied_become_two_where_one_is_adapted(options, layout, tmp_path):
    changes = {"tie_word_embeddings": True, "num_hidden_layers": 1}
    make(tmp_path / "base", "qwen3_moe", dtype=torch.float32, **changes)
    expected = logits_of(adapt(load_whole(tmp_path / "base"), tmp_path / "adapter", **options))
    done = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", layout)
    assert relative_error(logits_of(load_whole(tmp_path / "merged")), expected) < 1e-5, ORDER_OF_SUMS
    assert config_in(tmp_path / "merged")["tie_word_embeddings"] is False
    assert "whose head and embeddings are two weights" in done.notices[0]


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gemma4"])
def test_the_same_of_models_with_images_under_the_files_names(family, tmp_path):
    model = small_model(family, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    expected = logits_of(adapt(model, tmp_path / "adapter", None, target_modules=["lm_head"]))
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged, info = type(model).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not merged.all_tied_weights_keys
    assert relative_error(logits_of(merged), expected) < 1e-5, ORDER_OF_SUMS


def test_a_damaged_adapter_and_one_of_another_model_are_refused(folders, tmp_path):
    make(tmp_path / "other", "qwen3_moe", moe_intermediate_size=24)
    assert_refused(
        (tmp_path / "other", *folders[1:]), "have shapes.* trained on .*base, and this model is a Qwen3MoeFor"
    )
    experts = "num_local_experts" if "num_local_experts" in config_in(folders[0]) else "num_experts"
    for changes, of_adapter, of_model in (
        ({experts: 4}, "8 experts", "4 experts"),
        ({"hidden_size": 48}, "32 input features", "48 input features"),
        ({experts: 4, "moe_intermediate_size": 24}, "8 experts and 32 output features", "4 experts and 48 output"),
    ):
        edit_adapter_config(folders[1], peft_version="0.21.2")
        make(tmp_path / of_model, "qwen3_moe", **changes)
        with pytest.raises(CheckpointError) as error:
            merge_adapter(tmp_path / of_model, *folders[1:])
        said = str(error.value)
        assert f"the adapter is for {of_adapter}, and this model has {of_model}" in said and "PEFT" not in said
        assert said.endswith(
            f" trained on {folders[0]}, and this model is a Qwen3MoeForCausalLM of {tmp_path / of_model}"
        )
    assert_refused((folders[0], folders[0], folders[2]), "adapter_config.json")
    assert_refused((folders[1], folders[0], folders[2]), "holds an adapter, where a model is expected: give its base")
    (folders[1] / "adapter_model.safetensors").write_bytes(b"short")
    assert_refused(folders, "not a whole safetensors file")


def test_the_command_merges_and_says_what_it_did(folders, capsys):
    arguments = ["merge", *map(str, folders)]
    assert main([*arguments, "--layout", "native", "--verify"]) == 0
    assert "hub -> native" in " ".join(capsys.readouterr().out.split())
    adapted = PeftModel.from_pretrained(load_whole(folders[0]), folders[1])
    assert relative_error(logits_of(load_whole(folders[2])), logits_of(adapted)) < 1e-5, ORDER_OF_SUMS
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert "exists; remove it" in error and "Traceback" not in error


@pytest.mark.pinned
def test_a_tokenizer_and_a_template_of_the_adapter_come_before_those_of_the_base(tmp_path):
    """The model was trained with them; what the adapter does not have stays the base's."""
    (base, adapter, _), _ = base_and_adapter(tmp_path)
    word_tokenizer().save_pretrained(base)
    (base / "chat_template.jinja").write_text("of the base")
    (base / "notes.txt").write_text("of the base")
    (adapter / "notes.txt").write_text("of the adapter")

    def merged(name):
        done = merge_adapter(base, adapter, tmp_path / name)
        said = [notice for notice in done.notices if "tokenizer" in notice]
        return AutoTokenizer.from_pretrained(tmp_path / name), said, (tmp_path / name / "notes.txt").read_text()

    tokenizer, said, notes = merged("none")
    assert (tokenizer.chat_template, said, notes) == ("of the base", [], "of the base")
    (adapter / "chat_template.jinja").write_text("of the adapter")
    tokenizer, said, _ = merged("template")
    assert tokenizer.chat_template == "of the adapter" and len(said) == 1 and "chat_template.jinja" in said[0]
    trained = word_tokenizer()
    trained.add_tokens(["<new>"])
    trained.chat_template = "of the adapter, by its tokenizer"
    trained.save_pretrained(adapter)
    tokenizer, said, notes = merged("both")
    assert tokenizer.chat_template == trained.chat_template and "<new>" in tokenizer.get_vocab()
    assert len(said) == 1 and "the adapter's; the base's differ in" in said[0] and "tokenizer.json" in said[0]
    assert notes == "of the base"
    for file in (*adapter.glob("tokenizer*"), adapter / "chat_template.jinja"):
        shutil.copy(file, base)
    assert merged("alike")[1] == [], "the same files are worth no line"
