"""The base that vLLM serves is the one that the trainer computes with: rounded through the trainer's format, or the same
folder; and another one is told apart."""

import pytest
import torch
from accelerate import Accelerator
from helpers.checkpoints import tensors_in
from helpers.marks import rest_pinned
from helpers.models import build
from helpers.rl import GAP, load, logged_values, make
from peft import get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer as TRLsGRPOTrainer

import sonicmoe_hf
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.tools.cli.main import main
from sonicmoe_hf.trl import vllm_adapters
from sonicmoe_hf.trl.adapter_versions import AdapterVersions
from sonicmoe_hf.trl.served_base import check_served_base

WIDE = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 64},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64},
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 64},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64},
}


def rounded(base, folder, format):
    assert main(["convert", str(base), str(folder), "--layout", "hub", "--round", format]) == 0
    return folder


@pytest.mark.parametrize("family", rest_pinned(WIDE))
def test_rounded_experts_have_the_values_of_packed_ones_bit_by_bit_and_the_rest_is_untouched(family, tmp_path):
    """Each expert's matrices are packed, in every format, with those that Transformers puts beside them."""
    build(family, **WIDE[family]).bfloat16().save_pretrained(tmp_path / "base")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for format in FORMATS if family == "qwen3_moe" else ("nf4", "mxfp4"):
        found = AutoModelForCausalLM.from_pretrained(
            rounded(tmp_path / "base", tmp_path / format, format)
        ).state_dict()
        packed = sonicmoe_hf.from_pretrained(tmp_path / "base", experts_quantization=format)
        packed.dequantize()
        changed = 0
        for name, weight in packed.state_dict().items():
            assert torch.equal(found[name], weight), name
            changed += not torch.equal(dense.state_dict()[name], weight)
        assert changed >= 2 and found[name].dtype == torch.bfloat16


@pytest.mark.pinned
def test_a_base_rounded_as_the_trainer_holds_it_has_its_log_probabilities_and_an_unrounded_one_is_named(
    base, engine, tmp_path, caplog
):
    served = rounded(base, tmp_path / "nf4", "nf4")
    kept = {"max_steps": 2, "learning_rate": 1e-2}
    trainer_class = vllm_adapters(TRLsGRPOTrainer, served_base=served)
    trainer = make(trainer_class, base, tmp_path / "a", kept, model=load(base, experts_quantization="nf4"))
    trainer.train()
    assert 0 < max(logged_values(trainer)) < GAP and engine.made[0].options["model"] == str(served)
    assert "which vLLM serves" not in caplog.text
    with pytest.raises(ValueError, match="served_base is another model, or was rounded otherwise"):
        make(trainer_class, base, tmp_path / "b", kept)
    unrounded = make(
        vllm_adapters(TRLsGRPOTrainer), base, tmp_path / "c", kept, model=load(base, experts_quantization="nf4")
    )
    assert ": serve what is trained, sonicmoe-hf convert " in caplog.text
    assert "--layout hub --round nf4" in caplog.text and "served_base=" in caplog.text
    unrounded.train()
    assert min(logged_values(unrounded)) > 1e-3


@pytest.mark.pinned
@pytest.mark.parametrize("family, format, width", [("qwen3_moe", "fp8", 128), ("gpt_oss", "mxfp4", 64)])
def test_a_checkpoint_that_is_packed_on_the_hub_is_served_from_the_trained_folder(
    family, format, width, tmp_path, caplog
):
    """The adapter's versions are read by names and shapes of the model as if it were not packed."""
    build(family, **dict.fromkeys(WIDE[family], width)).bfloat16().save_pretrained(tmp_path / "base")
    sonicmoe_hf.convert_checkpoint(tmp_path / "base", tmp_path / "packed", "hub", quantize=format)
    model = load(tmp_path / "packed", experts_quantization=format)
    model = get_peft_model(model, sonicmoe_hf.lora_config(model, r=4))
    check_served_base(model, str(tmp_path / "packed"), is_given=True)
    with pytest.raises(ValueError, match=rf"base, which vLLM serves, are \d+\.\d% away .*in {format}\)"):
        check_served_base(model, str(tmp_path / "base"), is_given=True)
    version = AdapterVersions(model, Accelerator(cpu=True), tmp_path / "versions", torch.float32).publish()
    names = tensors_in(version.folder)
    assert any("experts" in name for name in names) and "was not compared" not in caplog.text


def test_a_native_model_is_compared_whatever_the_order_of_its_rows_and_a_base_elsewhere_is_passed_over(
    tmp_path, caplog
):
    build("qwen3_moe").save_pretrained(tmp_path / "hub")
    sonicmoe_hf.convert_checkpoint(tmp_path / "hub", tmp_path / "native")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    check_served_base(native, str(tmp_path / "hub"), is_given=True)
    build("qwen3_moe", seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"the experts of .*other, which vLLM serves, are \d+\.\d% away"):
        check_served_base(native, str(tmp_path / "other"), is_given=True)
    for sizes, message in (
        ({"num_hidden_layers": 1}, "has 1 layers with experts, and the trainer's model 2"),
        ({"moe_intermediate_size": 8}, "are of other shapes than those that the trainer"),
    ):
        build("qwen3_moe", **sizes).save_pretrained(tmp_path / message[:8])
        with pytest.raises(ValueError, match=message):
            check_served_base(native, str(tmp_path / message[:8]), is_given=True)
    check_served_base(native, "/no/such/folder", is_given=True)
    assert "was not compared" in caplog.text


@pytest.mark.parametrize(
    "source, options, message",
    [
        ("hub", ["--layout", "native"], "give --layout hub in place of native"),
        ("hub", ["--layout", "hub", "--dtype", "float16"], "leave --dtype out"),
        ("native", ["--layout", "hub"], "rows stand in another order"),
        ("packed", ["--layout", "hub"], "is nf4 already"),
    ],
)
def test_what_cannot_be_rounded_is_refused(source, options, message, base, tmp_path, capsys):
    if source == "native":
        sonicmoe_hf.convert_checkpoint(base, tmp_path / "native")
    elif source == "packed":
        load(base, experts_quantization="nf4").save_pretrained(tmp_path / "packed")
    folder = base if source == "hub" else tmp_path / source
    assert main(["convert", str(folder), str(tmp_path / "dst"), *options, "--round", "nf4"]) == 2
    assert message in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "dst").exists()
