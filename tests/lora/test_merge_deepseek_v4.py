"""An adapter trained over DeepSeek-V4's checkpoint, linear layers in FP8 and experts in FP4, merged into it."""

import shutil

import pytest
import torch
from helpers.checkpoints import config_in, edit_tensors, load_whole, make_deepseek_v4, same_bits, tensors_in
from helpers.marks import loads_matrices
from helpers.models import relative_error
from helpers.trl_trainers import word_tokenizer
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from sonicmoe_hf import (
    CheckpointError,
    convert_adapter,
    convert_checkpoint,
    from_pretrained,
    lora_config,
    merge_adapter,
)
from sonicmoe_hf.tools.checking.check import check_adapter
from sonicmoe_hf.tools.checking.models import Loading

pytestmark = loads_matrices
BF16 = 2**-8  # half a step of bf16, doubled: Transformers' and our sum may be rounded to neighbours
WHOLE = 0.05  # relative error of logits: every weight is rounded to bf16, in two layers of four streams
STEPS = {"mxfp4": 0.2, "fp8": 0.05}  # relative error of a matrix that is rounded up or down at random


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Write the checkpoint as `fp4`, the one that it stands for as `dense`, an adapter of all that lora_config names, and
    what PEFT makes of the dense one as `by peft`."""
    folder = tmp_path_factory.mktemp("v4")
    make_deepseek_v4(folder)
    model = from_pretrained(folder / "fp4", experts_quantization="mxfp4", dtype=torch.float32)
    model = get_peft_model(model, lora_config(model, r=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder / "adapter")
    dense = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
    merged = PeftModel.from_pretrained(dense, folder / "adapter").merge_and_unload()
    merged.save_pretrained(folder / "by peft")
    return folder


def changed_in(folder):
    """Name the tensors of the checkpoint that the adapter changes."""
    before, after = tensors_in(folder / "dense"), tensors_in(folder / "by peft")
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_it_becomes_bf16_under_the_hubs_names(trained, tmp_path):
    merge_adapter(trained / "fp4", trained / "adapter", tmp_path / "merged", verify=True)
    found, expected = tensors_in(tmp_path / "merged"), tensors_in(trained / "by peft")
    assert found.keys() == expected.keys()
    changed = changed_in(trained)
    assert len([name for name in changed if ".experts." in name]) == 2 * 4 * 3
    for name, tensor in expected.items():
        assert name not in changed or found[name].dtype == torch.bfloat16
        assert relative_error(found[name].float(), tensor.float()) < BF16, name
    assert not {"quantization_config", "expert_dtype"} & config_in(tmp_path / "merged").keys()


def test_it_keeps_fp4_and_fp8_where_that_is_asked(trained, tmp_path):
    merge_adapter(trained / "fp4", trained / "adapter", tmp_path / "kept", quantize="keep", verify=True)
    stored, kept = tensors_in(trained / "fp4"), tensors_in(tmp_path / "kept")
    assert {n: (t.dtype, t.shape) for n, t in kept.items()} == {n: (t.dtype, t.shape) for n, t in stored.items()}
    changed = changed_in(trained)
    parts = {end for name in changed for end in (name, name.replace(".weight", ".scale"))}
    assert same_bits({n: t for n, t in kept.items() if n not in parts}, {n: stored[n] for n in stored.keys() - parts})
    assert config_in(tmp_path / "kept") == config_in(trained / "fp4")
    again = from_pretrained(tmp_path / "kept", experts_quantization="mxfp4", dtype=torch.float32).dequantize()
    again.save_pretrained(tmp_path / "dense")
    found, expected = tensors_in(tmp_path / "dense"), tensors_in(trained / "by peft")
    for name in changed:
        step = STEPS["mxfp4" if ".experts." in name else "fp8"]
        assert 0 < relative_error(found[name].float(), expected[name].float()) < step, name


def test_a_packed_copy_keeps_its_format_or_becomes_dense_under_the_hubs_names(trained, tmp_path):
    from_pretrained(trained / "fp4", experts_quantization="mxfp4").save_pretrained(tmp_path / "packed")
    merge_adapter(tmp_path / "packed", trained / "adapter", tmp_path / "kept", quantize="keep")
    assert tensors_in(tmp_path / "kept").keys() == tensors_in(tmp_path / "packed").keys()
    merge_adapter(tmp_path / "packed", trained / "adapter", tmp_path / "merged", verify=True)
    found, expected = tensors_in(tmp_path / "merged"), tensors_in(trained / "by peft")
    assert found.keys() == expected.keys()
    assert all(relative_error(found[name].float(), expected[name].float()) < BF16 for name in expected)


def test_routers_that_were_trained_bring_their_table_which_must_be_the_bases(trained, tmp_path):
    """LoadBalancing(bias_update=...) asks for modules_to_save beside adapters, which writes the table of integers too."""
    model = from_pretrained(trained / "fp4", experts_quantization="mxfp4", dtype=torch.float32)
    config = lora_config(model, r=2)
    config.modules_to_save = ["gate"]
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "modules_to_save" in name and tensor.is_floating_point():
                tensor.add_(1.0)
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(trained / "fp4", tmp_path / "adapter", tmp_path / "merged", verify=True)
    base, merged = tensors_in(trained / "fp4"), tensors_in(tmp_path / "merged")
    changed = [name for name in base if ".gate." in name and not torch.equal(merged[name], base[name])]
    assert changed == [
        "model.layers.0.ffn.gate.weight",
        "model.layers.1.ffn.gate.bias",
        "model.layers.1.ffn.gate.weight",
    ]
    ids = torch.arange(16)[None]
    with torch.no_grad():
        served, expected = (each.eval()(input_ids=ids).logits for each in (load_whole(tmp_path / "merged"), model))
    assert relative_error(served, expected) < WHOLE
    convert_adapter(tmp_path / "adapter", tmp_path / "hub", "hub", trained_on=trained / "fp4")
    assert same_bits(tensors_in(tmp_path / "hub"), tensors_in(tmp_path / "adapter"))
    shutil.copytree(trained / "fp4", tmp_path / "other")
    edit_tensors(tmp_path / "other", lambda found: found["model.layers.0.ffn.gate.tid2eid"].add_(1).remainder_(4))
    with pytest.raises(
        CheckpointError, match=r"gate\.tid2eid, which no training changes, with other values than .*other: "
    ):
        merge_adapter(tmp_path / "other", tmp_path / "adapter", tmp_path / "refused")


def test_heads_that_predict_further_tokens_become_bf16_with_the_rest_or_keep_their_bytes(trained, tmp_path):
    """No model has them, but the result's config speaks for them too."""
    shutil.copytree(trained / "fp4", tmp_path / "base")
    layer, head = "model.layers.1.", "mtp.0."
    edit_tensors(
        tmp_path / "base",
        lambda found: found.update(
            {name.replace(layer, head): t.clone() for name, t in found.items() if name.startswith(layer)}
        ),
    )
    for quantize in (None, "keep"):
        merge_adapter(tmp_path / "base", trained / "adapter", tmp_path / f"{quantize}", quantize=quantize, verify=True)
    base, dense = ({n: t for n, t in tensors_in(trained / name).items() if layer in n} for name in ("fp4", "dense"))
    merged, kept = ({n: t for n, t in tensors_in(tmp_path / name).items() if head in n} for name in ("None", "keep"))
    assert same_bits({name.replace(head, layer): t for name, t in kept.items()}, base)
    assert merged.keys() == {name.replace(layer, head) for name in dense}
    for name, tensor in dense.items():
        assert torch.equal(merged[name.replace(layer, head)].float(), tensor.bfloat16().float()) or (
            torch.equal(merged[name.replace(layer, head)], tensor)
        )


def test_conversion_makes_the_hubs_and_packed_copies_dense_and_names_what_else_there_is(trained, tmp_path):
    from_pretrained(trained / "fp4", experts_quantization="mxfp4", dtype=torch.float32).save_pretrained(
        tmp_path / "packed"
    )
    dense = tensors_in(trained / "dense")
    for source in (trained / "fp4", tmp_path / "packed"):
        done = convert_checkpoint(source, tmp_path / f"from {source.name}", "hub", dtype="float32")
        assert (done.family, done.source_layout, done.target_layout) == ("deepseek_v4", "hub", "hub")
        found = tensors_in(done.path)
        assert found.keys() == dense.keys()
        assert all(
            torch.equal(found[name].float(), dense[name].bfloat16().float()) for name in dense if "experts" in name
        )
        load_whole(done.path)
    for refused, options in (("native layout", {}), ("native layout", {"layout": "hub", "quantize": "mxfp4"})):
        with pytest.raises(CheckpointError, match=f"{refused}.* --layout hub makes quantized weights bf16"):
            convert_checkpoint(trained / "fp4", tmp_path / "refused", **options)
    with pytest.raises(CheckpointError, match=r"is not quantized, and deepseek_v4 has no other layout; give dtype="):
        convert_checkpoint(trained / "dense", tmp_path / "refused", "hub")
    assert convert_checkpoint(trained / "dense", tmp_path / "cast", "hub", dtype="bfloat16").path.is_dir()


def test_a_users_whole_way_from_fp4_to_what_transformers_serves(tmp_path):
    """Three steps of the Trainer, resumed after the second; its adapter converted, merged and checked."""
    make_deepseek_v4(tmp_path)
    torch.manual_seed(0)
    rows = torch.randint(0, 64, (8, 16))
    data = [{"input_ids": row, "labels": row} for row in rows]
    options = {"max_steps": 3, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    arguments = TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True, disable_tqdm=True, **options)

    def made():
        model = from_pretrained(tmp_path / "fp4", experts_quantization="mxfp4", dtype=torch.float32)
        return Trainer(get_peft_model(model, lora_config(model, r=2)), arguments, train_dataset=data)

    first = made()
    first.train()
    first.save_model(str(tmp_path / "adapter"))
    again = made()
    again.train(resume_from_checkpoint=True)
    again.save_model(str(tmp_path / "resumed"))
    assert same_bits(tensors_in(tmp_path / "resumed"), tensors_in(tmp_path / "adapter"))
    convert_adapter(tmp_path / "adapter", tmp_path / "hub adapter", "hub")
    assert same_bits(tensors_in(tmp_path / "hub adapter"), tensors_in(tmp_path / "adapter"))
    merge_adapter(tmp_path / "fp4", tmp_path / "adapter", tmp_path / "merged")
    with torch.no_grad():
        expected = again.model.eval()(input_ids=rows).logits
        served = load_whole(tmp_path / "merged").eval()(input_ids=rows).logits
    assert relative_error(served, expected) < WHOLE


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_check_finds_the_adapter_in_what_was_merged_and_not_in_the_base(dtype, trained, tmp_path):
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    shutil.copytree(trained / "fp4", base)
    edit_tensors(
        base, lambda found: found.update({n: t.bfloat16() for n, t in found.items() if t.dtype == torch.float32})
    )
    word_tokenizer("<{}>").save_pretrained(base)
    text = tmp_path / "text"
    text.write_text(" ".join(f"<{word}>" for word in torch.randint(4, 64, (380,)).tolist()))
    convert_adapter(trained / "adapter", adapter, "hub", trained_on=base, base_model=str(base))
    merge_adapter(base, adapter, merged)
    places = [str(trained / "adapter"), str(merged), str(base)]
    loading = Loading(dtype, experts_quantization="mxfp4")
    found = check_adapter(str(base), str(adapter), places, text=str(text), loading=loading)
    assert [place.verdict.kind for place in found.places] == ["applied", "applied", "not applied"]


@pytest.mark.slow
def test_what_keeping_fp4_and_fp8_costs_is_their_rounding(tmp_path):
    """Logits are a quarter off the trained model's, as with noise of that size, and the loss is
    kept; the sum is exact."""
    make_deepseek_v4(tmp_path)
    ids = torch.randint(0, 64, (4, 48), generator=torch.Generator().manual_seed(5))
    options = {"input_ids": ids, "labels": ids, "use_cache": False}
    torch.manual_seed(0)
    model = from_pretrained(tmp_path / "fp4", experts_quantization="mxfp4", dtype=torch.float32)
    model = get_peft_model(model, lora_config(model, r=2)).train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    for _ in range(30):
        model(**options).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "adapter")

    def dense():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)

    @torch.no_grad()
    def output(model):
        return model.eval()(**options)

    trained = output(model)
    merged = PeftModel.from_pretrained(dense(), tmp_path / "adapter").merge_and_unload()
    assert relative_error(output(merged).logits, trained.logits) < 1e-5
    exact, found = merged.state_dict(), {}
    for rounding in ("dithered", "nearest"):
        place = tmp_path / rounding
        merge_adapter(tmp_path / "fp4", tmp_path / "adapter", place, quantize="keep", rounding=rounding)
        kept = from_pretrained(place, experts_quantization="mxfp4", dtype=torch.float32).dequantize()
        found[rounding] = output(kept), kept.state_dict()
    served, weights = found["dithered"]
    noisy = dense()
    with torch.no_grad():
        for name, parameter in noisy.named_parameters():
            noise = torch.randn_like(parameter) * parameter.numel() ** -0.5
            parameter.copy_(exact[name] + noise * (weights[name].float() - exact[name]).norm())
    errors = [relative_error(each.logits, trained.logits) for each in (served, output(noisy))]
    assert 0.1 < errors[0] < 0.4 and 0.5 < errors[0] / errors[1] < 2
    assert abs(served.loss - trained.loss) < 0.1, "dithering keeps the mean of what was learned"
    assert found["nearest"][0].loss - trained.loss > 0.2, "rounding to nearest gives half of it away"
