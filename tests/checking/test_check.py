"""`sonicmoe-hf check` tells where an adapter is applied, in part or not at all, of folders and of servers that lie."""

import json
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers.adapters import adapt
from helpers.checkpoints import edit_config, edit_tensors, make, tensors_in
from helpers.completions import ADAPTER, FakeServer, serve
from helpers.engine_adapters import edit_adapter_config
from helpers.marks import rest_pinned, rest_slow
from helpers.trl_trainers import word_tokenizer
from peft import PeftModel
from transformers import AutoModelForCausalLM

from sonicmoe_hf import convert_adapter, merge_adapter
from sonicmoe_hf.lora.packed_base import ENTRY
from sonicmoe_hf.tools.checking.check import Check, check_adapter
from sonicmoe_hf.tools.checking.hypotheses import layers_of
from sonicmoe_hf.tools.checking.place_judge import JudgedPlace
from sonicmoe_hf.tools.checking.server import NoAnswer, Server
from sonicmoe_hf.tools.checking.texts import LENGTH, Text
from sonicmoe_hf.tools.checking.verdict import Verdict
from sonicmoe_hf.tools.cli.check import print_check
from sonicmoe_hf.tools.cli.main import main

WHOLE_BLOCKS = {"hidden_size": 128, "moe_intermediate_size": 128}  # of FP8
WORD = "<{}>"
SIZE = 0.05  # of factors: the adapter changes log p of a token by some tenths


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Write a base with a tokenizer, an adapter on its experts and attention, and text that one forward takes."""
    folder = tmp_path_factory.mktemp("check")
    make(folder / "base", "deepseek_v3", dtype=torch.float32, **WHOLE_BLOCKS)
    word_tokenizer(WORD).save_pretrained(folder / "base")
    modules = ["q_a_proj", "kv_b_proj", "o_proj"]
    adapt(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter", size=SIZE, target_modules=modules)
    words = random.Random(0)
    (folder / "text").write_text(" ".join(WORD.format(words.randint(4, 63)) for _ in range(4 * LENGTH)))
    return SimpleNamespace(base=folder / "base", adapter=folder / "adapter", text=folder / "text", folder=folder)


def check(place, capsys, *arguments, adapter=None):
    """Run the command; return its exit code, and what it says of each place as JSON."""
    command = ["check", place.base, adapter or place.adapter, *arguments, "--text", place.text, "--json"]
    code = main([str(argument) for argument in command])
    captured = capsys.readouterr()
    return code, (json.loads(captured.out).get("places") or captured.out)


def test_that_files_alone_were_compared_is_said_once(place, capsys):
    paths = [str(path) for path in (place.base, place.adapter, place.adapter, place.base)]
    main(["check", *paths, "--text", str(place.text)])
    assert capsys.readouterr().out.count("files were compared; --server URL asks a running server") == 1


def test_shares_that_rounding_moves_from_100_percent_are_explained(capsys):
    for share, kind, expected in ((0.93, "applied", 1), (1.0, "applied", 0), (0.93, "cannot tell", 0)):
        verdict = Verdict(kind, "", 0.01, 1.0, {"experts": share, "rest": None}, may_be_scaled=False)
        print_check(Check(1.0, 400, [JudgedPlace("merged", verdict, is_base=False)]), asked_server=True)
        assert capsys.readouterr().out.count("differs from 100% by noise of rounding") == expected


def check_server(place, capsys, served):
    with serve(served) as url:
        return check(place, capsys, "--server", url, "--model", ADAPTER)


def tuned(place, change=None):
    """Make the base with the adapter, in which `change` may write."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place.base), place.adapter).eval()
    if change is not None:
        with torch.no_grad():
            for layer in layers_of(model):
                change(layer)
    return model


def base_of(place):
    return AutoModelForCausalLM.from_pretrained(place.base).eval()


def zero(*targets):
    return lambda layer: layer.target in targets and layer.b.zero_()


def zero_half_of_the_experts(layer):
    if layer.experts is not None:
        layer.b[:, layer.b.new_tensor(range(layer.b.shape[1])) % layer.experts.num_experts < 4] = 0


@pytest.mark.pinned
def test_what_is_computed_of_folders_is_said_forward_by_forward(place, tmp_path):
    merge_adapter(place.base, place.adapter, tmp_path / "merged")
    convert_adapter(place.adapter, tmp_path / "native", "native")
    said, folders = [], [str(tmp_path / "merged"), str(tmp_path / "native")]
    words = random.Random(1)
    (tmp_path / "text").write_text(" ".join(WORD.format(words.randint(4, 63)) for _ in range(12 * LENGTH)))
    check_adapter(str(place.base), str(place.adapter), folders, text=str(tmp_path / "text"), say=said.append)
    for verb, folder in zip(("loading", "reading"), folders):
        start = said.index(f"{verb} {folder}")
        forwards = [f"computing the texts with {folder}, {done} of 12" for done in (0, 8)]
        assert said[start + 1 : start + 3] == forwards, said


@pytest.mark.pinned
def test_folders_with_the_adapter_in_every_form(place, capsys):
    folder = place.folder
    merge_adapter(place.base, place.adapter, folder / "merged")
    merge_adapter(place.base, place.adapter, folder / "fp8", quantize="fp8")
    convert_adapter(place.adapter, folder / "native", "native")
    base = AutoModelForCausalLM.from_pretrained(place.base)
    adapt(base, folder / "with a head", target_modules=["o_proj"], modules_to_save=["lm_head"])
    names = ["with a head", "merged", "fp8", "native"]
    code, (other, *places) = check(place, capsys, *(folder / name for name in names), place.adapter)
    assert (code, other["kind"]) == (1, "other"), "what it leaves in PEFT's model is taken out again"
    assert {each["kind"] for each in places} == {"applied"}
    assert [each["reason"].startswith("merged and rounded: ") for each in places] == [False, True, False, False]
    assert all(each["from_adapter"] < 1e-6 for each in places if "fp8" not in each["place"])


def _by_rank(layer):
    if layer.experts is not None:
        layer.b.copy_(layer.b.unflatten(1, (-1, layer.rank)).transpose(1, 2).flatten(1))


def _rows_in_turn(layer):
    if layer.is_gate_up:
        layer.b.copy_(layer.b.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1))


LIES = {  # of a server's adapter: (change of its factors, the verdict, words of the reason)
    "honest": (None, "applied", ""),
    "none of it": (zero("q_a_proj", "kv_b_proj", "o_proj", "gate_up_proj", "down_proj"), "not applied", "the base"),
    "no experts": (zero("gate_up_proj", "down_proj"), "applied in part", "without its experts: the engine takes no"),
    "no attention": (zero("q_a_proj", "kv_b_proj", "o_proj"), "applied in part", "without what is beside its experts"),
    "down alone": (zero("gate_up_proj"), "applied in part", "without gate_up_proj"),
    "absorbed": (zero("kv_b_proj"), "applied in part", "without kv_b_proj: vLLM decodes without"),
    "half of the experts": (zero_half_of_the_experts, "applied in part", "of the change (experts)"),
    "columns": (_by_rank, "other", "order of columns"),
    "rows": (_rows_in_turn, "other", "gate's and up's rows"),
    "another": (lambda layer: layer.b.copy_(layer.b.flip(0)), "other", "another adapter, base or quantization"),
}


FURTHER = ["honest", "absorbed", "columns"]  # told with noise too, or as rows are
CASES = [("no experts", 0.05), ("honest", 0.05), ("absorbed", 0.05)]
CASES += [(lie, 0.0) for lie in LIES if lie not in FURTHER]


@pytest.mark.parametrize(("lie", "noise"), [*rest_pinned(CASES, 2), *rest_slow([(lie, 0.0) for lie in FURTHER], 0)])
def test_servers_that_lie(lie, noise, place, capsys):
    """Noise leaves a token's log-probability as far off as in bf16, of the base as of the adapter."""
    change, kind, words = LIES[lie]
    served = FakeServer(base_of(place), tuned(place, change), word_tokenizer(WORD), noise=noise)
    code, (base, adapter) = check_server(place, capsys, served)
    assert (base["kind"], base["is_base"]) == ("not applied", True)
    assert adapter["kind"] == kind and words in adapter["reason"] and code == (kind != "applied")


@pytest.mark.pinned
@pytest.mark.parametrize(
    "form, lie",
    rest_slow([("text", "no experts"), ("generated", "honest"), ("text", "honest"), ("generated", "no experts")]),
)
def test_servers_that_tell_what_they_generate_alone(form, lie, place, capsys):
    """vLLM on a CPU gives no log-probabilities of a prompt under an adapter, `transformers serve` none at all."""
    change, kind, words = LIES[lie]
    served = FakeServer(base_of(place), tuned(place, change), word_tokenizer(WORD), form)
    code, (base, adapter) = check_server(place, capsys, served)
    assert base["kind"] == "not applied"
    assert adapter["kind"] == kind and words in adapter["reason"] and code == (kind != "applied")


@pytest.mark.pinned
def test_a_server_whose_base_has_the_adapter_too(place, capsys):
    code, (base, adapter) = check_server(place, capsys, FakeServer(tuned(place), tuned(place), word_tokenizer(WORD)))
    assert (base["kind"], adapter["kind"], code) == ("applied", "applied", 1)


@pytest.mark.parametrize(("model", "listed"), [(ADAPTER, "base"), ("", "base, tuned")])
def test_a_server_without_the_adapter_names_those_that_it_has_and_the_limit_of_ranks(model, listed, place, capsys):
    served = FakeServer(base_of(place), tuned(place), word_tokenizer(WORD), listed=not model)
    command = ["check", str(place.base), str(place.adapter), "--text", str(place.text), "--model", model]
    with serve(served) as url:
        assert main([*command, "--server", url]) == 2
    said = capsys.readouterr().err
    assert f"does not list {model!r}, only: {listed}." in said and "--max-lora-rank" in said


@pytest.mark.parametrize(
    ("form", "model", "said"),
    [("text", ADAPTER, "generated other tokens than the tokenizer makes"), ("prompts", "", "by --model NAME")],
)
def test_a_server_of_texts_whose_tokens_are_not_known_and_one_that_is_not_told_which_model(
    form, model, said, place, capsys
):
    served = FakeServer(base_of(place), tuned(place), word_tokenizer(WORD), form, listed=None, hidden_tokens=5)
    command = ["check", str(place.base), str(place.adapter), "--text", str(place.text), "--server"]
    with serve(served) as url:
        assert main([*command, url, "--model", model]) == 2
        assert said in capsys.readouterr().err
        assert model or main([*command, url, "--model", ADAPTER]) == 0
    if model:
        with serve(FakeServer(base_of(place), tuned(place), word_tokenizer(WORD), "prompts", listed=None)) as url:
            assert main([*command, url, "--model", ADAPTER]) == 0


@pytest.mark.pinned
def test_an_adapter_in_unsloths_older_order_is_checked_in_that_order(place, capsys, tmp_path):
    """PEFT, and a server that takes the file as PEFT's, load it without a word and compute another adapter."""
    adapter = shutil.copytree(place.adapter, tmp_path / "unsloth")
    edit_adapter_config(adapter, auto_mapping={"unsloth_fixed": True})
    merge_adapter(place.base, adapter, tmp_path / "merged")
    merge_adapter(place.base, place.adapter, tmp_path / "by peft")
    code, (merged, by_peft) = check(place, capsys, tmp_path / "merged", tmp_path / "by peft", adapter=adapter)
    assert (merged["kind"], by_peft["kind"], code) == ("applied", "other", 1)
    assert "--layout hub" in by_peft["reason"]


@pytest.mark.pinned
def test_a_place_that_scales_by_rank_is_told_of_rslora_and_alpha_pattern(place, capsys, tmp_path):
    adapter = shutil.copytree(place.adapter, tmp_path / "adapter")
    edit_adapter_config(adapter, use_rslora=True, alpha_pattern={"o_proj": 9})
    plain = shutil.copytree(adapter, tmp_path / "plain")
    edit_adapter_config(plain, use_rslora=False, alpha_pattern={})
    for each in (adapter, plain):
        merge_adapter(place.base, each, tmp_path / f"merged {each.name}")
    code, (right, wrong) = check(
        place, capsys, *(tmp_path / f"merged {name}" for name in ("adapter", "plain")), adapter=adapter
    )
    assert (right["kind"], wrong["kind"], code) == ("applied", "other", 1)
    assert "without its alpha_pattern and rsLoRA" in wrong["reason"]


@pytest.mark.pinned
@pytest.mark.parametrize("untrained", ["experts", "self_attn"])
def test_an_adapter_of_which_a_part_was_not_trained_is_applied_where_the_rest_is(untrained, place, capsys, tmp_path):
    adapter = shutil.copytree(place.adapter, tmp_path / "adapter")
    edit_tensors(adapter, lambda tensors: [b.zero_() for n, b in tensors.items() if untrained in n and "_B" in n])
    merge_adapter(place.base, adapter, tmp_path / "merged")
    code, (merged,) = check(place, capsys, tmp_path / "merged", adapter=adapter)
    assert (merged["kind"], code) == ("applied", 0)
    assert list(merged["shares"]) == ["rest" if untrained == "experts" else "experts"]


def test_what_cannot_be_compared_is_an_error(place, capsys, tmp_path):
    nan, other, bare = tmp_path / "nan", tmp_path / "other", tmp_path / "bare"
    shutil.copytree(place.base, nan)
    edit_tensors(nan, {"model.norm.weight": torch.full((128,), torch.nan)})
    make(other, "qwen3_moe", vocab_size=40)
    shutil.copytree(place.base, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    (tmp_path / "empty").write_text("")
    damaged = shutil.copytree(bare, tmp_path / "damaged")
    (damaged / "tokenizer_config.json").write_text("{")
    classifier = shutil.copytree(place.base, tmp_path / "classifier")
    edit_config(classifier, architectures=["DeepseekV3ForSequenceClassification"])
    for base, arguments, words in (
        (place.base, [], "nothing to compare with the adapter"),
        (place.base, [classifier], "classifier is a DeepseekV3ForSequenceClassification, which gives no prob"),
        (place.base, [nan], "nan gives log-probabilities that are not finite"),
        (place.base, [other], "other ends at token 39"),
        (bare, [bare], "has a tokenizer"),
        (damaged, [bare], "damaged/tokenizer_config.json cannot be read"),
        (place.base, [nan, "--text", tmp_path / "empty"], "less than two tokens"),
    ):
        command = ["check", base, place.adapter, *arguments]
        command += [] if "--text" in arguments else ["--text", place.text]
        assert main([str(argument) for argument in command]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.pinned
def test_what_cannot_be_told_is_said(place, capsys, tmp_path, caplog):
    adapter = shutil.copytree(place.adapter, tmp_path / "untrained")
    tensors = tensors_in(adapter)
    edit_tensors(adapter, {name: 0 * tensor for name, tensor in tensors.items() if "lora_B" in name})
    edit_adapter_config(adapter, auto_mapping={ENTRY: {"format": "nf4", "codes": [1, 2]}}, task_type="CAUSAL_LM")
    code, (merged,) = check(place, capsys, place.base, adapter=adapter)
    assert (merged["kind"], code) == ("cannot tell", 2) and "the adapter itself changes nothing" in merged["reason"]
    assert "trained on experts in nf4, and those of" in caplog.text, "whatever implementation the base has"


def test_an_adapter_of_packed_experts_that_was_merged_into_the_dense_base_is_applied(place, capsys, tmp_path):
    """Packing changes the base, which does not count as a missing part of the adapter."""
    merge_adapter(place.base, place.adapter, tmp_path / "merged")
    words = random.Random(1)
    text = tmp_path / "text"
    text.write_text(" ".join(WORD.format(words.randint(4, 63)) for _ in range(1600)))
    longer = SimpleNamespace(**{**vars(place), "text": text})
    code, (merged,) = check(longer, capsys, tmp_path / "merged", "--experts-quantization", "nf4")
    assert not merged["reason"]
    assert (merged["kind"], code) == ("applied", 0) and min(merged["shares"].values()) > 0.9


def no_completion(**choice):
    return {"choices": [choice]}


ANSWERS = [  # of a server that is none of ours: to v1/models, and to every request
    ([], None),
    ({"data": "tuned"}, None),
    ({"data": [{"id": ["tuned"]}, "tuned", {"id": "tuned", "parent": {"id": "base"}}]}, None),
    (None, []),
    (None, {"choices": {"text": ""}}),
    (None, {"choices": ["text"]}),
    (None, no_completion(logprobs=[0.1])),
    (None, no_completion(logprobs={"token_logprobs": {"a": 1}})),
    (None, no_completion(logprobs={"token_logprobs": [True] * 200})),
    (None, no_completion(logprobs={"token_logprobs": [10**400] * 200})),
    (None, no_completion(token_ids=[-1, -2], logprobs={"token_logprobs": [-0.5, -0.5]})),
    (None, no_completion(token_ids=3, text="")),
    (None, no_completion(text=3)),
]


@pytest.mark.parametrize(("models", "completion"), ANSWERS)
def test_a_server_that_answers_otherwise_is_refused_in_a_sentence(models, completion):
    class Other:
        def answer(self, path, body):
            if path == "/v1/models":
                return 200, {"data": [{"id": ADAPTER}]} if models is None else models
            return 200, {"choices": [{}]} if completion is None else completion

    with serve(Other()) as url:
        server = Server(url, word_tokenizer(WORD))
        assert server.base_of(ADAPTER) is None
        with pytest.raises(NoAnswer, match=url):
            server.observe(ADAPTER, [Text(tuple(range(4, 24)))])
