"""Messages of conversion, merging and adapters: each is raised, and then what it names is done."""

import json
import shutil

import pytest
import torch
from filelock import FileLock
from helpers.adapters import adapt
from helpers.checkpoints import config_in, edit_config, edit_tensors, load_whole, make, same_bits, tensors_in, to_fp8
from helpers.engine_adapters import edit_adapter_config
from helpers.integers import to_integers
from helpers.marks import loads_matrices
from helpers.models import batch, logits_of, relative_error
from helpers.said import says, silent
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME

import sonicmoe_hf
from sonicmoe_hf import convert_adapter, convert_checkpoint, from_pretrained, merge_adapter
from sonicmoe_hf.checkpoints.layouts import VERSION_KEY
from sonicmoe_hf.checkpoints.reading.config_only import build_on_meta
from sonicmoe_hf.checkpoints.reading.files import INDEX_FILE, WEIGHTS_FILE
from sonicmoe_hf.tools.cli.main import main

pytestmark = pytest.mark.pinned
ONE = {"num_hidden_layers": 1}
OF_128 = {**ONE, "hidden_size": 128, "moe_intermediate_size": 128}
CONVERT = "convert it first: sonicmoe-hf convert SRC DST --layout native"
EXACT = 1e-5  # fp32: sums in another order
BF16 = 0.02  # weights rounded to bf16


class Place:
    """A folder with a base, one of its adapters, and the logits of both."""

    def __init__(self, folder, family="qwen3_moe", **options):
        self.path, self.base, self.adapter = folder, folder / "base", folder / "adapter"
        make(self.base, family, dtype=torch.float32, **{**ONE, **options})
        self.trained = adapt(load_whole(self.base), self.adapter)

    def gives(self, folder, expected=None, tolerance=EXACT, format=None):
        expected = logits_of(self.trained) if expected is None else expected
        model = from_pretrained(folder, dtype=torch.float32, experts_quantization=format)
        return relative_error(logits_of(model), expected) < tolerance


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture
def of_128(tmp_path):
    return Place(tmp_path, hidden_size=128, moe_intermediate_size=128)


# folders


def test_where_a_folder_goes(place):
    target = place.path / "native"
    target.mkdir()
    (target / "mine").write_text("mine")
    with says("exists; remove it or name another folder"):
        convert_checkpoint(place.base, target)
    (target / "mine").unlink()
    target.rmdir()
    target.symlink_to(place.path / "elsewhere")
    with says("is a link, which would be replaced; name the folder itself, or a new one"):
        convert_checkpoint(place.base, target)
    with FileLock(place.path / ".another.converting.lock"):
        with says("another conversion into", "wait for it or use another name"):
            convert_checkpoint(place.base, place.path / "another")
        convert_checkpoint(place.base, place.path / "third")
    for folder in ("elsewhere", "another"):
        convert_checkpoint(place.base, place.path / folder)
    assert all(place.gives(place.path / name, logits_of(load_whole(place.base))) for name in ("elsewhere", "third"))


def test_links_out_of_a_folder(place):
    (place.path / "secret").write_text("terms")
    (place.base / "LICENSE").symlink_to(place.path / "secret")
    with says("put a copy in its place, or remove the link"):
        convert_checkpoint(place.base, place.path / "native")
    (place.base / "LICENSE").unlink()
    (place.base / "LICENSE").write_text("terms")
    convert_checkpoint(place.base, place.path / "native")
    assert (place.path / "native" / "LICENSE").read_text() == "terms"


def test_weights_that_two_files_have(tmp_path):
    place = Place(tmp_path, num_hidden_layers=2)
    expected = logits_of(load_whole(place.base))
    shards = sorted(place.base.glob("model-*.safetensors"))
    shutil.copy(shards[0], place.base / WEIGHTS_FILE)
    with says(
        "which names other files; Transformers would load model.safetensors: remove the one that is out of date"
    ):
        convert_checkpoint(place.base, tmp_path / "native")
    (place.base / WEIGHTS_FILE).unlink()
    name, tensor = next(iter(load_file(shards[0]).items()))
    edit_shard(shards[1], name, tensor)
    with says("remove the one that is out of date"):
        convert_checkpoint(place.base, tmp_path / "native")
    edit_shard(shards[1], name, None)
    convert_checkpoint(place.base, tmp_path / "native")
    assert place.gives(tmp_path / "native", expected)


def edit_shard(path, name, tensor):
    tensors = {**load_file(path), name: tensor}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


def cut_the_index(folder):
    (folder / INDEX_FILE).write_text('{"weight_map": {}}')


def name_a_lost_weight(folder):
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"]["lost.weight"] = next(iter(index["weight_map"].values()))
    (folder / INDEX_FILE).write_text(json.dumps(index))


DAMAGES = {
    "has no weight_map that names files; download it again": cut_the_index,
    "which is in none of the files; download the checkpoint again": name_a_lost_weight,
    "model_type is None; download it again": lambda folder: edit_config(folder, model_type=None),
    "holds no JSON object, but []; download it again": lambda folder: (folder / "config.json").write_text("[]"),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_damaged_folder_is_written_anew(words, place):
    """A copy of the folder stands for the hub's."""
    shutil.copytree(place.base, place.path / "copy")
    DAMAGES[words](place.base)
    with says(words):
        convert_checkpoint(place.base, place.path / "native")
    shutil.rmtree(place.base)
    shutil.copytree(place.path / "copy", place.base)
    convert_checkpoint(place.base, place.path / "native")
    assert place.gives(place.path / "native", logits_of(load_whole(place.base)))


@loads_matrices
def test_modelopts_file_is_written_anew(tmp_path):
    make(tmp_path / "base", "qwen3_moe", **ONE)
    (tmp_path / "base" / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    with says("names no quant_algo below quantization; download it again"):
        from_pretrained(tmp_path / "base")
    declared = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "base" / "hf_quant_config.json").write_text(json.dumps(declared))
    assert from_pretrained(tmp_path / "base")(**batch()).loss.isfinite()


def test_a_missing_weight_comes_with_the_checkpoint_downloaded_again(tmp_path):
    place = Place(tmp_path, "mixtral")
    whole = tensors_in(place.base)
    name = next(name for name in whole if "norm" in name)
    edit_tensors(place.base, {name: None})
    with says("is missing, which MixtralForCausalLM has; download the checkpoint again"):
        place_merge(place)
    edit_tensors(place.base, whole)
    assert place_merge(place)


def place_merge(place, to="merged", tolerance=EXACT, **options):
    merge_adapter(place.base, place.adapter, place.path / to, **options)
    return place.gives(place.path / to, tolerance=tolerance)


# conversion


def test_options_of_conversion_that_contradict_each_other(of_128):
    place, native = of_128, of_128.path / "native"
    with says("and dequantize=True contradict each other; leave one out"):
        convert_checkpoint(place.base, native, quantize="nf4", dequantize=True)
    convert_checkpoint(place.base, native, quantize="nf4")
    with says("writes the hub's layout and leaves other tensors their dtype; leave layout and dtype out"):
        convert_checkpoint(place.base, place.path / "hub", layout="hub", quantize="fp8", dtype="float16")
    convert_checkpoint(place.base, place.path / "hub", layout="hub", quantize="fp8")
    with says("and rounding twice loses more: keep that format, or convert the bf16 checkpoint"):
        convert_checkpoint(native, place.path / "twice", quantize="fp8")
    convert_checkpoint(place.base, place.path / "fp8", quantize="fp8")
    fp8, hub = (
        from_pretrained(place.path / name, experts_quantization=format, dtype=torch.float32)
        for name, format in (("fp8", None), ("hub", "fp8"))
    )
    assert relative_error(logits_of(fp8), logits_of(hub)) < EXACT, "the same blocks"
    with says("is quantized (fp8): give quantize='fp8' (--quantize fp8) to keep the experts in that format"):
        convert_checkpoint(place.path / "hub", place.path / "kept", dequantize=False)
    convert_checkpoint(place.path / "hub", place.path / "kept", quantize="fp8")
    assert same_bits(tensors_in(place.path / "kept"), tensors_in(place.path / "fp8"))


def test_dtypes_of_conversion(tmp_path):
    place = Place(tmp_path)
    norm = next(name for name in tensors_in(place.base) if name.endswith("up_proj.weight"))
    half = tensors_in(place.base)[norm].half()
    edit_tensors(place.base, {norm: half})
    with says("needs one dtype; give dtype="):
        convert_checkpoint(place.base, tmp_path / "native")
    convert_checkpoint(place.base, tmp_path / "native", dtype="float32")
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "native").values()} == {torch.float32}
    edit_tensors(place.base, {norm: half.float() * 1e6})
    with says("which are infinite in torch.float16; cast to bfloat16 or float32"):
        convert_checkpoint(place.base, tmp_path / "half", dtype="float16")
    convert_checkpoint(place.base, tmp_path / "bf16", dtype="bfloat16")
    assert all(tensor.isfinite().all() for tensor in tensors_in(tmp_path / "bf16").values())
    make(tmp_path / "mixtral", "mixtral", dtype=torch.float32, **ONE)
    with says("has no other layout; give dtype= to cast it"):
        convert_checkpoint(tmp_path / "mixtral", tmp_path / "cast", layout="hub")
    convert_checkpoint(tmp_path / "mixtral", tmp_path / "cast", layout="hub", dtype="bfloat16")
    whole, cast = tensors_in(tmp_path / "mixtral"), tensors_in(tmp_path / "cast")
    assert all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in cast.items())


def test_native_classes_read_what_was_converted(place):
    convert_checkpoint(place.base, place.path / "native")
    cls = type(AutoModelForCausalLM.from_pretrained(place.path / "native"))
    words = f"{CONVERT}, and load the result with AutoModelForCausalLM"
    with says("this is a checkpoint of model_type 'qwen3_moe', not", words):
        cls.from_pretrained(place.base)
    make(place.path / "olmoe", "olmoe", **ONE)
    with says("this is a checkpoint of model_type 'olmoe', not", words):
        cls.from_pretrained(place.path / "olmoe")
    convert_checkpoint(place.path / "olmoe", place.path / "native olmoe")
    assert AutoModelForCausalLM.from_pretrained(place.path / "native olmoe")(**batch()).loss.isfinite()
    native = cls.from_pretrained(place.path / "native")
    with says("is not a weight of the native layout (experts.c_fc, experts.c_proj)", CONVERT):
        native.load_state_dict(load_whole(place.base).state_dict())
    with says("has no place in the native layout", CONVERT):
        native.load_adapter(place.adapter)
    native = cls.from_pretrained(place.path / "native")
    native.load_adapter(convert_adapter(place.adapter, place.path / "of native", "native", trained_on=place.base))
    assert relative_error(logits_of(native), logits_of(place.trained)) < EXACT
    edit_tensors(
        place.path / "native", {next(name for name in tensors_in(place.path / "native") if "c_fc" in name): None}
    )
    with says("it is not in the native layout", CONVERT):
        cls.from_pretrained(place.path / "native")
    edit_config(place.path / "native", **{VERSION_KEY: 99})
    with says("update sonicmoe-hf, or convert the checkpoint again"):
        cls.from_pretrained(place.path / "native")
    convert_checkpoint(place.base, place.path / "again")
    assert place.gives(place.path / "again", logits_of(load_whole(place.base)))


@loads_matrices
def test_zeros_that_the_config_denies(tmp_path):
    make(tmp_path / "base", "qwen3_moe", **ONE, hidden_size=128, moe_intermediate_size=128)
    to_integers(tmp_path / "base", "gptq-asym")
    declared = config_in(tmp_path / "base")["quantization_config"]
    edit_config(tmp_path / "base", quantization_config={**declared, "sym": True})
    with says("set sym to false in the quantization_config"):
        from_pretrained(tmp_path / "base", experts_quantization="int4")
    edit_config(tmp_path / "base", quantization_config={**declared, "sym": False})
    model = from_pretrained(tmp_path / "base", experts_quantization="int4", dtype=torch.float32)
    assert relative_error(logits_of(model), logits_of(load_whole(tmp_path / "dense"))) < BF16


def with_code(folder, architecture):
    edit_config(
        folder,
        model_type="theirs",
        architectures=[architecture],
        auto_map={"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"},
    )


def test_a_model_type_of_the_checkpoints_own(place):
    expected = logits_of(load_whole(place.base))
    with_code(place.base, "Qwen3MoeForCausalLM")
    with says("in a local copy take auto_map out, and set model_type to 'qwen3_moe'"):
        build_on_meta(place.base)
    edit_config(place.base, auto_map=None, model_type="qwen3_moe")
    assert type(build_on_meta(place.base)).__name__ == "Qwen3MoeForCausalLM"
    assert place.gives(place.base, expected)
    with_code(place.base, "TheirModel")
    with says("load it with trust_remote_code=True, and ask sonicmoe_hf.supports"):
        build_on_meta(place.base)
    (place.base / "theirs.py").write_text(CODE)
    model = AutoModelForCausalLM.from_pretrained(place.base, trust_remote_code=True)
    assert [layer.accelerated for layer in sonicmoe_hf.supports(model)] == [True]


CODE = """
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

class Config(Qwen3MoeConfig):
    model_type = "theirs"

class Model(Qwen3MoeForCausalLM):
    config_class = Config
"""


# merging and adapters as files


def test_layouts_and_formats_of_a_merge(of_128):
    place = of_128
    with says("writes the hub's layout; leave layout='native' out"):
        place_merge(place, layout="native", quantize="fp8")
    merge_adapter(place.base, place.adapter, place.path / "fp8", quantize="fp8")
    assert place.gives(place.path / "fp8", tolerance=0.2, format="fp8"), "3 bits of mantissa"
    convert_checkpoint(place.base, place.path / "native base", quantize="nf4")
    with says("writes the base's own layout, 'native'; leave layout out"):
        merge_adapter(place.path / "native base", place.adapter, place.path / "kept", layout="hub", quantize="keep")
    done = merge_adapter(place.path / "native base", place.adapter, place.path / "kept", quantize="keep")
    with says("merge into that and pack the result, which loses less (sonicmoe-hf merge ORIGINAL ADAPTER DST, then"):
        print(*done.notices)
    assert place_merge(place, "merged")
    convert_checkpoint(place.path / "merged", place.path / "packed", quantize="nf4")
    errors = [
        relative_error(logits_of(from_pretrained(place.path / name, dtype=torch.float32)), logits_of(place.trained))
        for name in ("packed", "kept")
    ]
    assert errors[0] < errors[1] * 1.1, errors


def test_a_change_that_rounding_ate_is_served_unmerged_or_in_bf16(of_128):
    place = of_128
    to_fp8(place.base)
    place.base = place.path / "dense"  # whose values are FP8's
    place.trained = adapt(load_whole(place.base), place.adapter, size=0.01)  # changes of a small part of a step
    words = "or leave --quantize out and serve bf16"
    ate = "warning: rounding to fp8 ate more than half of the adapter's change in"
    with says(
        "serve the adapter beside the base, unmerged (sonicmoe-hf convert ADAPTER DST --layout vllm)", ate, words
    ):
        print(*merge_adapter(place.base, place.adapter, place.path / "fp8", quantize="fp8").notices)
    convert_adapter(place.adapter, place.path / "vllm", "vllm", trained_on=place.base)
    served, factors = tensors_in(place.path / "vllm"), tensors_in(place.adapter)
    assert len(served) > len(factors) and {float(each.abs().max()) > 0 for each in served.values()} == {True}
    with silent(words):
        print(*merge_adapter(place.base, place.adapter, place.path / "merged").notices)
    assert place.gives(place.path / "merged")


def test_an_adapter_where_a_model_is_expected(place):
    with says("holds an adapter, where a model is expected: give its base"):
        merge_adapter(place.adapter, place.adapter, place.path / "merged")
    assert place_merge(place)


def test_a_base_that_cannot_be_read_is_named(place):
    edit_adapter_config(place.adapter, base_model_name_or_path=str(place.path / "gone"))
    with says("cannot be read; say trained_on= (--trained-on), its folder"):
        convert_adapter(place.adapter, place.path / "vllm", "vllm")
    converted = convert_adapter(place.adapter, place.path / "vllm", "vllm", trained_on=place.base)
    assert len(tensors_in(converted))
    with says("is for adapters, and", "download one of the hub first, hf download ORG/NAME --local-dir FOLDER"):
        assert main(["convert", "org/adapter", str(place.path / "x"), "--layout", "vllm"]) == 2
    command = [
        "convert",
        str(place.adapter),
        str(place.path / "x"),
        "--layout",
        "vllm",
        "--trained-on",
        str(place.base),
    ]
    assert main(command) == 0


def test_an_adapter_in_pickles_is_saved_again(place):
    weights = place.adapter / "adapter_model.safetensors"
    torch.save(tensors_in(place.adapter), place.adapter / "adapter_model.bin")
    weights.unlink()
    with says("is not read: load it with PEFT or Transformers and save it again"):
        place_merge(place)
    PeftModel.from_pretrained(load_whole(place.base), place.adapter).save_pretrained(place.adapter)
    assert place_merge(place)


def test_a_model_in_pickles_is_saved_again(place):
    tensors = tensors_in(place.base)
    for file in place.base.glob("model*.safetensors*"):
        file.unlink()
    torch.save(tensors, place.base / "weights.bin")
    (place.base / WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "weights.bin")}))
    with says(f"{WEIGHTS_INDEX_NAME} is not read: load it with PEFT or Transformers and save it again"):
        place_merge(place)
    (place.base / "weights.bin").rename(place.base / WEIGHTS_NAME)
    with says(f"{WEIGHTS_NAME} is not read: load it with PEFT or Transformers and save it again"):
        place_merge(place)
    (place.base / WEIGHTS_INDEX_NAME).unlink()
    AutoModelForCausalLM.from_pretrained(place.base).save_pretrained(place.base)
    assert place_merge(place)
