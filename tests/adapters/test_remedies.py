"""The remedies that errors about adapters name: each is carried out, and gives the model that was trained."""

import shutil
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from helpers.adapters import EXPERTS, adapt
from helpers.checkpoints import edit_config, edit_tensors, load_whole, make, tensors_in, to_fp8
from helpers.engine_adapters import edit_adapter_config
from helpers.models import ORDER_OF_SUMS, logits_of, relative_error
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import Concatenate, ConversionOps

import sonicmoe_hf
from sonicmoe_hf import CheckpointError, convert_adapter, merge_adapter
from sonicmoe_hf.adapters.engines import CLASSES
from sonicmoe_hf.checkpoints.reading.files import WEIGHTS_FILE
from sonicmoe_hf.formats.hub_names import HubNames
from sonicmoe_hf.tools.cli.main import main

TOLERANCE = 1e-5  # relative error of logits in fp32: sums in another order
LONGER = 66  # tokens of a resized vocabulary


class Folder:
    """A folder with base, adapter, and the logits of the model that was trained."""

    def __init__(self, folder, family="qwen3_moe", parameters=EXPERTS, *, of=None, resized=None, **adapter):
        self.path, self.base, self.adapter = folder, folder / "base", folder / "adapter"
        make(self.base, family, dtype=torch.float32, **{"num_hidden_layers": 1, **(of or {})})
        trained = self.load()
        if resized:
            trained.resize_token_embeddings(resized)
        self.model = adapt(trained, self.adapter, parameters, **adapter)
        self.trained = logits_of(self.model)

    def load(self, folder=None):
        return AutoModelForCausalLM.from_pretrained(folder or self.base, dtype=torch.float32)

    def merge(self, *, base=None, adapter=None, to="merged", **options):
        merge_adapter(base or self.base, adapter or self.adapter, self.path / to, **options)
        return logits_of(self.load(self.path / to))

    def convert(self, layout="vllm", to="converted", **options):
        return convert_adapter(self.adapter, self.path / to, layout, **options)


def merge(folder):
    return folder.merge()


def with_peft(folder):
    """Merge as WITH_PEFT says, and save."""
    adapted = PeftModel.from_pretrained(sonicmoe_hf.from_pretrained(folder.base), folder.adapter)
    adapted.merge_and_unload().save_pretrained(folder.path / "by peft")
    return logits_of(folder.load(folder.path / "by peft"))


def by_the_command(folder):
    assert main(["merge", str(folder.base), str(folder.adapter), str(folder.path / "by command")]) == 0
    return logits_of(folder.load(folder.path / "by command"))


class Case(NamedTuple):
    """An error's words, what raises it, and what each remedy in it gives."""

    words: str
    folder: Callable[..., Folder]
    raises: Callable[[Folder], object]
    remedies: list[Callable[[Folder], torch.Tensor]]


def trained(family="qwen3_moe", parameters=EXPERTS, **options):
    return lambda path: Folder(path, family, parameters, **options)


def of_peft(words, *arguments, **options):
    return Case(
        rf"{words}.*merge it with PEFT: .*merge_and_unload", trained(*arguments, **options), merge, [with_peft]
    )


def of_engines(words, *arguments, **options):
    remedies = [by_the_command, with_peft]
    return Case(rf"{words}.* sonicmoe-hf merge BASE", trained(*arguments, **options), Folder.convert, remedies)


def of_unknown_model(words):
    def convert(folder):
        with mock.patch.dict(CLASSES, vllm=()):
            folder.convert()

    return of_engines(words)._replace(raises=convert)


def of_another_name(words):
    """Convert as if PEFT loaded every module under another name."""

    def convert(folder):
        with mock.patch.object(HubNames, "in_adapter", return_value=None):
            folder.convert("hub")

    return of_engines(words)._replace(raises=convert)


TIED = {"tie_word_embeddings": True}
ATTENTION_BIAS = {"attention_bias": True}


def resize(folder):
    """Merge into the base with a vocabulary of the adapter's size."""
    base = folder.load()
    base.resize_token_embeddings(LONGER)
    base.save_pretrained(folder.path / "resized")
    return folder.merge(base=folder.path / "resized")


def of_a_resized(name, tied, **options):
    words = rf"resize the base's too, by model.resize_token_embeddings\({LONGER}\), save it and give that folder"
    own = {"of": TIED if tied else None, "resized": LONGER, **options}
    return pytest.param(Case(words, trained(**own), merge, [resize]), id=f"{name}, {'tied' if tied else 'untied'}")


MERGED_BY_PEFT = {
    "DoRA": of_peft("use_dora is True, which is not plain LoRA", parameters=None, use_dora=True),
    "trained biases": of_peft("bias is 'lora_only'", of=ATTENTION_BIAS, bias="lora_only"),
    "adapted embeddings": of_peft("lora_embedding_A is neither lora_A nor lora_B", target_modules=["embed_tokens"]),
    "adapted embeddings, tied": of_peft("lora_embedding_A is neither", target_modules=["embed_tokens"], of=TIED),
    "tied adapters": of_peft(
        "ensure_weight_tying is True", of=TIED, target_modules=["lm_head"], ensure_weight_tying=True
    ),
    "tied copies": of_peft(
        "ensure_weight_tying is True", of=TIED, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
}
FOR_ENGINES = {
    "head": of_engines("of the embeddings or the head", target_modules=["lm_head"]),
    "tied head": of_engines("of the embeddings or the head", target_modules=["lm_head"], of=TIED),
    "whole head": of_engines(
        "modules_to_save is .'lm_head'., of which engines take none", modules_to_save=["lm_head"]
    ),
    "whole tied embeddings": of_engines("modules_to_save is", modules_to_save=["embed_tokens"], of=TIED),
    "router": of_engines("adapts a router", "qwen3_moe", [*EXPERTS, "mlp.gate.weight"]),
    "biases": of_engines("down_proj_bias, and engines take", "gpt_oss", [*EXPERTS, "mlp.experts.down_proj_bias"]),
    "unknown to engines": of_unknown_model("is not known to take adapters of Qwen3MoeForCausalLM"),
    "a name that PEFT loads otherwise": of_another_name("under another name, and would lose them"),
    "rank": of_engines("the adapter's largest rank is 513", rank_pattern={"q_proj": 513}),
    "absorbed": of_engines(
        "kv_b_proj, and vLLM decodes", "deepseek_v3", of={"first_k_dense_replace": 0}, target_modules=["kv_b_proj"]
    ),
}


def test_what_an_engine_does_not_apply_is_left_out_of_training(tmp_path):
    of = {"first_k_dense_replace": 0}
    trained = [
        Folder(tmp_path / name, "deepseek_v3", of=of, target_modules=[name]) for name in ("kv_b_proj", "o_proj")
    ]
    with pytest.raises(CheckpointError, match="or leave kv_b_proj out of target_modules when you train"):
        trained[0].convert()
    assert {name.split(".")[-3] for name in tensors_in(trained[1].convert())} >= {"o_proj"}


def raising(damage, call=merge):
    """Make a function that raises the error: `call`, after the damage."""

    def damaged(folder):
        damage(folder)
        return call(folder)

    return damaged


def add_a_copy(folder):
    name = next(iter(tensors_in(folder.adapter)))
    edit_tensors(folder.adapter, {f"module.{name}": tensors_in(folder.adapter)[name].clone()})


def remove_a_factor(folder):
    edit_tensors(folder.adapter, {next(name for name in tensors_in(folder.adapter) if "q_proj.lora_A" in name): None})


def make_infinite(folder):
    edit_tensors(folder.adapter, lambda tensors: next(iter(tensors.values()))[0].fill_(torch.inf))


def with_a_base_that_is_infinite(folder):
    name = next(name for name in tensors_in(folder.base) if "q_proj" in name)
    whole = tensors_in(folder.base)[name]
    edit_tensors(folder.base, {name: torch.full_like(whole, torch.inf)})
    folder.whole = {name: whole}
    return folder.merge()


def look_for_it(folder):
    """Find the infinite value, which is in the base, and take that weight as it was."""
    found = [name for name, tensor in tensors_in(folder.base).items() if not tensor.isfinite().all()]
    assert found == [*folder.whole] and all(tensor.isfinite().all() for tensor in tensors_in(folder.adapter).values())
    edit_tensors(folder.base, folder.whole)
    return folder.merge()


def save_again(folder):
    folder.model.save_pretrained(folder.adapter)
    return folder.merge()


def train_again(folder):
    again = Folder(folder.path / "again", "olmoe", EXPERTS[:1])
    return again.merge()


def into_another(folder):
    make(folder.path / "another", "qwen3_moe", dtype=torch.float32)
    return folder.merge(base=folder.path / "another")


def into_one_of_other_sizes(folder):
    make(folder.path / "larger", "qwen3_moe", dtype=torch.float32, num_hidden_layers=1, moe_intermediate_size=24)
    return folder.merge(base=folder.path / "larger")


def name_the_base(folder):
    return folder.merge(adapter=folder.convert("hub", trained_on=folder.base))


def without_an_inverse(folder):
    """Merge as if Transformers could not write this family's experts back."""
    with mock.patch.object(Concatenate, "reverse_op", property(ConversionOps.reverse_op.fget)):
        return folder.merge()


def without_a_weight(folder):
    """Merge into a base without a norm that Transformers lets checkpoints lack: it begins as ones, as it is there."""
    edit_tensors(folder.base, {next(name for name in tensors_in(folder.base) if "q_norm" in name): None})
    with mock.patch.object(Qwen3MoeForCausalLM, "_keys_to_ignore_on_load_missing", ["q_norm"]):
        return folder.merge()


def with_peft_in_memory(folder):
    """Merge as WITH_PEFT says; the model is computed with, and not saved."""
    adapted = PeftModel.from_pretrained(sonicmoe_hf.from_pretrained(folder.base), folder.adapter)
    return logits_of(adapted.merge_and_unload())


def pack_beside_bitsandbytes(folder):
    """Pack the base beside linear layers of bitsandbytes, and merge into that."""
    linear = BitsAndBytesConfig(load_in_4bit=True)
    model = sonicmoe_hf.from_pretrained(folder.base, experts_quantization="nf4", quantization_config=linear)
    model.save_pretrained(folder.path / "packed")
    return folder.merge(base=folder.path / "packed")


def remove(name, of="base"):
    """Remove an entry of config.json, or a file of the adapter's folder."""

    def removed(folder):
        if of == "base":
            edit_config(folder.base, **{name: None})
        else:
            (folder.adapter / name).unlink()
        return folder.merge()

    return removed


def without_module_names(folder):
    names = [name for name in tensors_in(folder.adapter) if name.startswith("module.")]
    edit_tensors(folder.adapter, dict.fromkeys(names))
    return folder.merge()


OTHERS = {
    "two names": Case("keep the one that was trained", trained(), raising(add_a_copy), [without_module_names]),
    "a factor is missing": Case("Save the whole adapter again", trained(), raising(remove_a_factor), [save_again]),
    "infinite": Case("take an earlier checkpoint", trained(), raising(make_infinite), [save_again]),
    "an infinite base": Case(
        "with the adapter added has NaN or infinite values in .*; look for them in the adapter and in the base",
        trained(),
        with_a_base_that_is_infinite,
        [look_for_it],
    ),
    "an older PEFT": Case(
        "train the adapter with a newer PEFT",
        trained("olmoe", EXPERTS[:1]),
        raising(lambda folder: edit_adapter_config(folder.adapter, peft_version="0.18.0")),
        [train_again],
    ),
    "no base": Case(
        r"names no base model; say trained_on= \(--trained-on\)",
        trained(),
        raising(
            lambda folder: edit_adapter_config(folder.adapter, base_model_name_or_path=None),
            lambda folder: folder.convert("hub"),
        ),
        [name_the_base],
    ),
    "another base": Case(
        r"Give the model that it was trained on \(merge: the base",
        trained("deepseek_v3", of={"first_k_dense_replace": 0}, target_modules=["kv_b_proj"]),
        into_another,
        [merge],
    ),
    "a base of other sizes": Case(
        "the adapter is for 32 output features, and this model has 48 .*; give the base that it was trained on",
        trained(),
        into_one_of_other_sizes,
        [merge],
    ),
    "a dense base": Case(
        "is not quantized, .*; leave quantize out", trained(), lambda folder: folder.merge(quantize="keep"), [merge]
    ),
    "a family of one layout": Case(
        "without --layout, and without --quantize",
        trained("mixtral"),
        lambda folder: folder.merge(layout="native"),
        [merge],
    ),
    "one folder": Case(
        "give model and adapter a folder each",
        trained(),
        raising(
            lambda folder: shutil.copy(folder.adapter / "adapter_model.safetensors", folder.adapter / WEIGHTS_FILE)
        ),
        [remove(WEIGHTS_FILE, of="adapter")],
    ),
    "no inverse": Case(
        "cannot be written back.*has no inverse.*merge_and_unload",
        trained("mixtral"),
        without_an_inverse,
        [with_peft_in_memory],
    ),
    "a weight that is not stored": Case(
        "which the adapter changes, comes from no weight in .*merge it with PEFT: .*merge_and_unload",
        trained(modules_to_save=["q_norm"]),
        without_a_weight,
        [with_peft],
    ),
    "linear layers of bitsandbytes": Case(
        "merge the adapter into the model's bf16 checkpoint",
        trained(of={"hidden_size": 64, "moe_intermediate_size": 64}),
        pack_beside_bitsandbytes,
        [merge],
    ),
    "other weights": Case(
        "remove the entry",
        trained(),
        raising(lambda folder: edit_config(folder.base, transformers_weights="other.safetensors")),
        [remove("transformers_weights")],
    ),
}


LATEST = {"trained biases": [pytest.mark.pinned]}  # PEFT 0.20 does not save them


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name, marks=LATEST.get(name, ())) for name, case in (MERGED_BY_PEFT | OTHERS).items()),
        *(
            pytest.param(case, id=f"for engines: {name}", marks=pytest.mark.pinned)
            for name, case in FOR_ENGINES.items()
        ),
        *(of_a_resized("head adapted", tied, target_modules=["lm_head"]) for tied in (False, True)),
        *(of_a_resized("whole", tied, modules_to_save=["embed_tokens", "lm_head"]) for tied in (False, True)),
    ],
)
def test_what_a_message_names_gives_the_model_that_was_trained(case, tmp_path):
    folder = case.folder(tmp_path)
    assert relative_error(logits_of(folder.load())[..., :64], folder.trained[..., :64]) > 0.02, "it changes something"
    with pytest.raises(CheckpointError, match=case.words):
        case.raises(folder)
    for remedy in case.remedies:
        assert relative_error(remedy(folder), folder.trained) < TOLERANCE, ORDER_OF_SUMS


def test_a_head_that_was_tied_is_merged_into_an_fp8_base_as_bf16(tmp_path):
    make(tmp_path / "base", "qwen3_moe", dtype=torch.float32, num_hidden_layers=1, **TIED)
    to_fp8(tmp_path / "base")
    expected = logits_of(adapt(load_whole(tmp_path / "dense"), tmp_path / "adapter", target_modules=["lm_head"]))
    folders = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight .*has no weight of its own in .* .--quantize keep. out"
    ):
        merge_adapter(*folders, quantize="keep")
    merge_adapter(*folders)
    assert relative_error(logits_of(load_whole(tmp_path / "merged")), expected) < 0.02, "weights rounded to bf16"
