"""sonicmoe-hf plan: what fits, the parts of each peak, and commands that the examples take as they stand."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import DECLARED_FP8
from helpers.integers import DECLARED, compressed_config
from helpers.marks import rest_pinned
from helpers.models import CONFIGS, OF_64, build, nemotron_h
from helpers.small_families import OMNI, small_config
from helpers.terminal import make_configs
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3MoeConfig, Qwen3OmniMoeConfig

import sonicmoe_hf
from benchmarks.step.models import MODELS
from sonicmoe_hf.errors import UnsupportedModelError
from sonicmoe_hf.layer.backends import BACKEND_VARIABLE
from sonicmoe_hf.model_patches import FAMILIES
from sonicmoe_hf.tools.cli.commands import gibibytes
from sonicmoe_hf.tools.cli.main import main
from sonicmoe_hf.tools.cli.plan import PARTS, runnable
from sonicmoe_hf.tools.planning.choices import choose_shown
from sonicmoe_hf.tools.planning.memory import GIB, experts_bytes, memory_of
from sonicmoe_hf.tools.planning.sizes import sizes_of_checkpoint, sizes_of_model
from sonicmoe_hf.tools.planning.step import Step
from sonicmoe_hf.tools.planning.training import Training
from sonicmoe_hf.tools.planning.ways import GAPS, LIGER, in_sequences, ways_of, why_left_out
from sonicmoe_hf.tools.random_models import QWEN3_30B_A3B, config_from

pytestmark = pytest.mark.pinned
GPT_OSS = GptOssConfig(num_hidden_layers=24, num_local_experts=32)


def olmoe(**changes):
    return CONFIGS["olmoe"](**{**OF_64["olmoe"], "num_hidden_layers": 1, "num_experts": 4, **changes})


def sizes_of(config, name="org/model"):
    with torch.device("meta"):
        return sizes_of_model(name, AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def plan_json(capsys, *arguments):
    code = main(["plan", "--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Make folders named as hub models, with their configs alone."""
    folder = tmp_path_factory.mktemp("hub")
    make_configs(folder)
    return folder


def test_only_qlora_fits_qwen3_on_a_card_of_24_gib(hub, capsys):
    arguments = hub / "Qwen" / "Qwen3-30B-A3B", "--gpu-memory", "24GB", "--tokens", 2048
    code, plan = plan_json(capsys, *arguments)
    (way,) = [way for way in plan["ways"] if way["fits"]]
    assert code == 0 and way["method"] == "qlora" and "examples/qlora.py" in way["command"]
    assert way["peak_GiB"] == pytest.approx(21.4, rel=0.02)
    assert plan["parameters"] == 30_532_122_624, "as its model card says"
    assert main(["plan", *map(str, arguments)]) == 0
    printed = capsys.readouterr().out
    assert way["command"] in printed and "does not fit: full fp32, one GPU" in printed
    assert max(map(len, printed.splitlines())) > 160, "no line is cut where it is piped"
    assert "To fine-tune, begin with 1: adapters of all experts, beside weights in NF4." in printed


def test_the_way_to_begin_with_is_first_the_others_by_what_trains_and_by_nearness_to_bf16_and_all_where_asked_for(
    hub, capsys
):
    arguments = ["plan", str(hub / "Qwen" / "Qwen3-30B-A3B"), "--gpus", "4"]
    assert main(arguments) == 0
    few = capsys.readouterr().out
    rows = [line.split(None, 1)[1] for line in few.splitlines() if line[:3].strip().isdigit() and ", " in line[:40]]
    kinds = [row.partition(",")[0] for row in rows]
    assert list(dict.fromkeys(kinds)) == ["LoRA", "full bf16", "QLoRA FP8", "QLoRA NF4"]
    assert "begin with 1: adapters of all experts, beside weights in bf16, nothing rounded; 2 trains all" in few
    assert main([*arguments, "--all"]) == 0
    every = capsys.readouterr().out
    assert "other formats too: --all" in few and "MXFP4" not in few
    assert every.index("QLoRA NF4") < every.index("QLoRA NVFP4") < every.index("QLoRA MXFP4") and "--all" not in every


def test_a_model_that_is_not_there_is_told_that_its_config_is_enough(capsys):
    code, plan = plan_json(capsys, "org/no-such-model")
    assert code == 2 and "give a local folder, of which config.json is enough" in plan["error"]


def test_a_card_that_the_experts_do_not_fit_has_as_many_of_them_as_it_holds(hub, capsys):
    code, plan = plan_json(capsys, hub / "Qwen" / "Qwen3-30B-A3B", "--gpu-memory", "12GiB", "--tokens", "2048")
    assert code == 0
    way = next(way for way in plan["ways"] if way["fits"])
    assert way["name"] == "QLoRA NF4 linear too, r=8, 12 GiB of experts in host memory, one GPU + checkpointing"
    assert way["command"].endswith(" --experts-memory 2GiB") and 9.5 < way["peak_GiB"] < 10.0


def test_layers_in_host_memory_leave_those_that_stay_and_two_buffers():
    sizes = sizes_of(Qwen3MoeConfig(**QWEN3_30B_A3B))
    training = Training(method="qlora", experts="nf4", tokens=2048)
    layer, resident = experts_bytes(sizes, "nf4") / 48, memory_of(Step(sizes, training))
    for kept, expected in ((0, 2), (3 * layer, 5), (3.5 * layer, 5), (100 * layer, 48)):
        streamed = memory_of(Step(sizes, replace(training, experts_memory=int(kept) + (kept > 0))))
        assert streamed.experts == pytest.approx(expected * layer, rel=1e-9)
        assert resident.total - streamed.total == pytest.approx((48 - expected) * layer, abs=1)


def test_what_is_left_holds_whole_layers_expanded_and_is_said_where_all_ways_are(hub, capsys):
    folder = hub / "Qwen" / "Qwen3-30B-A3B"
    of_layer = 128 * 3 * 2048 * 768 * 2 / GIB  # three matrices of 128 experts in bf16
    for way in ways_of(sizes_of_checkpoint(str(folder)), gpus=1, gpu_memory=80, tokens=4096):
        layers = int((80 - way.needed) / GAPS / of_layer) if way.training.method == "qlora" else 0
        assert way.expanded_layers == layers <= 48, way.name
        assert layers * of_layer <= way.expanded_memory < layers * of_layer + 1
    assert main(["plan", str(folder), "--gpu-memory", "80GiB", "--all"]) == 0
    assert "by which packed experts lie expanded: 2: 22GiB, 3: 39GiB, 4: 34GiB" in capsys.readouterr().out
    assert plan_json(capsys, folder, "--gpu-memory", "80GiB")[1]["ways"][-1]["expanded_memory_GiB"] > 0


def test_a_long_sequence_takes_what_pieces_and_offloading_leave(hub, capsys):
    """Beyond a piece the experts add nothing but the routing; offloaded, hidden states of two layers are on the GPU."""
    arguments = hub / "Qwen" / "Qwen3-30B-A3B", "--sequence-length", 262144, "--method", "qlora"
    code, plan = plan_json(capsys, *arguments)
    way = next(way for way in plan["ways"] if way["fits"])
    assert code == 0 and plan["tokens"] == 262144 and way["name"].endswith("+ checkpointing + offloading")
    assert "--sequence-length 262144 --batch-size 1" in way["command"] and "--activation-offloading" in way["command"]
    sizes = sizes_of(Qwen3MoeConfig(**QWEN3_30B_A3B))
    of = {"method": "qlora", "experts": "nf4", "liger": True}
    whole, cut, more = (Training(**of, tokens=tokens, sequence=tokens) for tokens in (32768, 131072, 262144))
    h = 2 * 8 * 2 * sizes.inner
    assert Step(sizes, whole).layer_bytes - Step(sizes, cut).layer_bytes == h, "h of a token, which pieces do not keep"
    stream = 2 * sizes.hidden * cut.tokens
    offloaded = memory_of(Step(sizes, replace(cut, offloading=True)))
    assert memory_of(Step(sizes, cut)).activations - offloaded.activations == pytest.approx(
        (48 - 2) * stream, rel=0.05
    )
    per_token = (memory_of(Step(sizes, more)).activations - memory_of(Step(sizes, cut)).activations) / cut.tokens
    assert per_token == pytest.approx(
        Step(sizes, cut).layer_bytes + 12 * sizes.attention.output + 48 * 2 * sizes.hidden, rel=0.1
    )


def test_commands_run_from_anywhere(hub, tmp_path, capsys, monkeypatch):
    """Commands name examples/ of the checkout, or the package's."""
    arguments = hub / "Qwen" / "Qwen3-30B-A3B", "--gpus", 8, "--gpu-memory", "1000GB"
    _, here = plan_json(capsys, *arguments)
    monkeypatch.chdir(tmp_path)
    _, there = plan_json(capsys, *arguments)
    folder = f"{Path(sonicmoe_hf.__file__).parent}/examples/"
    for one, other in zip(here["ways"], there["ways"], strict=True):
        assert other["command"].replace(folder, "examples/") == one["command"]
        files = [word for word in shlex.split(other["command"]) if word.endswith((".py", ".yaml", ".json"))]
        assert files and all(Path(file).is_absolute() and Path(file).is_file() for file in files)
    assert main(["plan", *map(str, arguments)]) == 0
    assert f" {folder}finetune.py" in capsys.readouterr().out
    monkeypatch.setattr("sonicmoe_hf.tools.cli.plan.FOLDER", Path("/a b"))
    moved = runnable("python examples/qlora.py --model examples/x.json/y")
    assert shlex.split(moved) == ["python", "/a b/qlora.py", "--model", "examples/x.json/y"]


def test_parts_add_up_and_a_way_fits_where_its_need_does(hub, capsys):
    _, plan = plan_json(capsys, hub / "Qwen" / "Qwen3-30B-A3B", "--gpus", 8, "--gpu-memory", "80GB")
    assert {way["method"] for way in plan["ways"]} == {"full", "lora", "qlora"}
    for way in plan["ways"]:
        assert set(way["parts_GiB"]) == set(PARTS)
        assert sum(way["parts_GiB"].values()) == pytest.approx(way["peak_GiB"], abs=0.05)
        assert (
            way["fits"] is (way["needed_GiB"] <= plan["gpu_memory_GiB"] == 79) and way["needed_GiB"] > way["peak_GiB"]
        )
    names = {way["name"].partition(" + ")[0] for way in plan["ways"]}
    assert {"full fp32, FSDP2", "full fp32, ZeRO-3", "full bf16, expert parallelism", "LoRA, DDP"} <= names
    assert {"LoRA, FSDP2", "QLoRA FP8, FSDP2", "QLoRA NVFP4, r=8, expert parallelism"} <= names


@pytest.mark.parametrize("kind, name", rest_pinned([("ct-32", "INT4"), ("awq", "UINT4")]))
def test_experts_in_integers_are_planned_as_they_come(kind, name, tmp_path, capsys):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "quantization_config": DECLARED[kind]}
    CONFIGS["qwen3_moe"](**sizes).save_pretrained(tmp_path)
    code, plan = plan_json(capsys, tmp_path)
    names = {way["name"].partition(",")[0] for way in plan["ways"]}
    assert code == 0 and names == {f"QLoRA {name}"}


def test_what_cannot_be_planned_for_is_said(hub, tmp_path, capsys):
    assert main(["plan", str(hub / "Qwen" / "Qwen3-30B-A3B"), "--gpu-memory", "4"]) == 1, "nothing fits"
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path / "dense")
    config = CONFIGS["qwen3_moe"](quantization_config={"quant_method": "awq"})
    config.save_pretrained(tmp_path / "awq")
    small_config(Qwen3OmniMoeConfig, OMNI).save_pretrained(tmp_path / "omni")
    CONFIGS["qwen3_moe"]().save_pretrained(tmp_path / "modelopt")
    (tmp_path / "modelopt" / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    capsys.readouterr()
    for folder, words in (
        (tmp_path / "dense", "no mixture-of-experts"),
        (tmp_path / "awq", "awq in None bits, which is not read: load the bf16 checkpoint"),
        (tmp_path / "none", "none"),
        (tmp_path / "omni", "as a model without a loss"),
        (tmp_path / "modelopt", "load the bf16 checkpoint that it was made from"),
    ):
        code, plan = plan_json(capsys, folder)
        assert code == 2 and words in plan["error"] and "sonicmoe-hf convert" not in plan["error"]
    for memory_ in ("80XB", "much", "-1GB"):
        with pytest.raises(SystemExit) as exit:
            main(["plan", "x", f"--gpu-memory={memory_}"])
        assert exit.value.code == 2
        assert f"it is '{memory_}'; give the memory of a GPU in MiB, MB, GiB, GB or TiB" in capsys.readouterr().err
    assert gibibytes("80 GiB") == gibibytes("80gib") == gibibytes("81920MiB") == gibibytes("81920mb") == 80
    assert gibibytes("23.5GiB") == 23.5 and gibibytes("1TiB") == gibibytes("1TB") == 1024


@pytest.mark.parametrize(
    ("name", "least"),  # GiB, the smallest that torch reports of such cards: A30; RTX 5090; H100; H200
    [("24GB", 23.53), ("32GB", 31.34), ("80GB", 79.11), ("141", 139.72)],
)
def test_a_cards_name_stands_for_the_gib_that_such_cards_have(name, least):
    assert 0.99 * least < gibibytes(name) <= least
    assert gibibytes(name.removesuffix("GB")) == gibibytes(name.lower()) == gibibytes(name)


def test_deepseek_v3_fits_one_node_in_nf4_with_its_experts_and_their_adapters_split(hub):
    sizes = sizes_of_checkpoint(str(hub / "deepseek-ai" / "DeepSeek-V3"))
    biases = 58 * 256  # the routers', which are buffers here
    assert sizes.total + biases == 671_026_419_200, "as the model card says: 671 billion"
    ways = ways_of(sizes, gpus=8, gpu_memory=80, tokens=4096)
    fitting, _ = choose_shown(ways)
    (way,) = fitting
    assert way.name == "QLoRA NF4, r=8, expert parallelism + checkpointing"
    assert "DeepSeek-V3 --experts-quantization nf4" in way.command and "convert" not in way.command
    assert way.training.liger
    on_experts, on_attention = way.step.adapter_parameters
    assert way.memory.adapters == 12 * (on_experts / 8 + on_attention)
    assert way.memory.experts == experts_bytes(sizes, "nf4") / 8


@pytest.mark.parametrize(
    ("gpus", "tokens", "parts", "options"),
    [
        (1, 4096, "linear too, r=8", "--experts-memory 0GiB --linear-nf4"),
        (1, 16384, "linear too, 8-bit Adam, r=8", "--experts-memory 3GiB --linear-nf4 --optim adamw_8bit"),
        (4, 8192, "linear too, 8-bit Adam, r=8", "--experts-memory 5GiB --replicate --linear-nf4 --optim adamw_8bit"),
    ],
)
def test_deepseek_v3_fits_on_few_gpus_of_80_gib_with_its_experts_in_host_memory(hub, gpus, tokens, parts, options):
    sizes = sizes_of_checkpoint(str(hub / "deepseek-ai" / "DeepSeek-V3"))
    (way,), _ = choose_shown(ways_of(sizes, gpus=gpus, gpu_memory=80, tokens=tokens, method="qlora"))
    parallel = "DDP" if gpus > 1 else "one GPU"
    assert way.name == f"QLoRA NF4 {parts}, 314 GiB of experts in host memory, {parallel} + checkpointing"
    assert way.command.endswith(options) and way.memory.host == experts_bytes(sizes, "nf4")
    trained = sum(way.step.adapter_parameters)  # 2.5e9, which Adam keeps in 12 bytes each, or in 6
    assert way.memory.adapters == pytest.approx((6.03 if "8-bit" in parts else 12) * trained, rel=1e-3)
    assert way.memory.rest / GIB == pytest.approx(10.9, abs=0.1), "31.9 in bf16"
    loading = 2 * sizes.rest + (1 + 0.52) * sizes.largest_weight  # dense linear layers, a weight in FP8 and in NF4
    assert loading < way.memory.total, "so that loading needs no column"


def test_kimi_k25_fits_on_one_card_of_80_gib_by_a_small_rank_and_on_eight_of_141_by_expert_parallelism():
    model = MODELS["Kimi-K2.5"]
    config = config_from(model.model_type, model.sizes | {"quantization_config": compressed_config()}, model.layers)
    sizes = sizes_of(config, "moonshotai/Kimi-K2.5")
    assert experts_bytes(sizes, "int4") / GIB == pytest.approx(531.6, abs=0.1)
    small = " --linear-nf4 --optim adamw_8bit --rank 4"
    for gpus, memory_, words, options in (
        (
            1,
            80,
            "INT4 linear too, 8-bit Adam, r=4, 532 GiB of experts in host memory",
            f"--experts-memory 7GiB{small}",
        ),
        (1, 141, "INT4, r=8, 523 GiB of experts in host memory", "--experts-memory 14GiB"),
        (4, 80, "INT4 linear too, 8-bit Adam, r=4, 532 GiB of experts", f"--experts-memory 4GiB --replicate{small}"),
        (8, 141, "INT4, r=8, expert parallelism", "--sequence-length 4096 --batch-size 1"),
    ):
        fitting, _ = choose_shown(ways_of(sizes, gpus=gpus, gpu_memory=memory_, tokens=4096, method="qlora"))
        way = fitting[-1]  # beside r = 16 by FSDP2 on eight
        assert words in way.name and way.command.endswith(options) and " --experts-quantization int4" in way.command


@pytest.mark.parametrize(("format", "bits"), [("nf4", 4.127), ("mxfp4", 4.25), ("fp8", 8.002), ("nvfp4", 4.5)])
def test_packed_experts_take_the_bits_of_their_format(format, bits):
    sizes = sizes_of(Qwen3MoeConfig(**QWEN3_30B_A3B))
    assert 8 * experts_bytes(sizes, format) / sizes.experts == pytest.approx(bits, abs=1e-3)


def test_a_quantized_checkpoint_is_planned_in_its_own_format_and_dequantized():
    for config, own in ((GPT_OSS, "mxfp4"), (Qwen3MoeConfig(**QWEN3_30B_A3B), "fp8")):
        config.quantization_config = {**DECLARED_FP8, "quant_method": own}
        ways = ways_of(sizes_of(config), gpus=1, gpu_memory=80, tokens=4096)
        assert {way.training.experts for way in ways if way.name.startswith("QLoRA")} == {own, "nf4"} - (
            {"nf4"} if own == "mxfp4" else set()
        )
        for way in ways:
            is_plain = way.training.method != "qlora"
            assert ("--dequantize" in way.command) is is_plain, way.command
            assert way.training.linear == "bf16", "bitsandbytes packs linear layers of a plain checkpoint alone"
    config.quantization_config = {"quant_method": "sonicmoe_hf", "experts": "nf4", "linear": None}
    sizes = sizes_of(config)
    assert {way.training.method for way in ways_of(sizes, gpus=1, gpu_memory=80, tokens=4096)} == {"qlora"}
    config.quantization_config = {**config.quantization_config, "linear": "nf4"}  # which convert does not read
    assert why_left_out(sizes_of(config)).endswith("; plan for the bf16 checkpoint that it was made from")
    config.quantization_config = {
        **DECLARED_FP8,
        "expert_dtype": "fp4",
    }  # DeepSeek-V4's, which --dequantize does not know
    ways = ways_of(sizes_of(config), gpus=1, gpu_memory=80, tokens=4096)
    assert {way.training.experts for way in ways} == {"mxfp4"}
    assert "convert" in why_left_out(sizes_of(config)), "which reads both"
    with pytest.raises(UnsupportedModelError, match="sonicmoe-hf convert org/model FOLDER --layout hub"):
        ways_of(sizes, gpus=1, gpu_memory=80, tokens=4096, method="full")


def test_experts_of_a_size_that_a_format_does_not_take_are_not_planned_in_it():
    config = olmoe(intermediate_size=48)
    formats = {way.training.experts for way in ways_of(sizes_of(config), gpus=1, gpu_memory=8, tokens=64)}
    assert formats == {"bf16", "fp8", "nvfp4"}, "48 is no multiple of 32 or 64"


def test_experts_that_the_gpus_do_not_divide_are_not_split_over_them():
    sizes = sizes_of(olmoe(num_experts=6))
    for gpus, is_split in ((3, True), (4, False)):
        ways = ways_of(sizes, gpus=gpus, gpu_memory=8, tokens=64)
        assert any(way.training.parallel == "expert parallelism" for way in ways) is is_split
        packed = {way.training.parallel for way in ways if way.training.method == "qlora"}
        assert ("FSDP2" in packed) is is_split and "DDP" in packed
        assert any(way.training.parallel == "FSDP2" for way in ways if way.training.method == "full")


def test_attention_with_sinks_is_planned_as_it_is_loaded():
    sizes = sizes_of(GPT_OSS)
    by_name = {way.name: way for way in ways_of(sizes, gpus=1, gpu_memory=80, tokens=4096)}
    assert by_name["LoRA, one GPU"].training.attention == "torch_sinks"
    eager = by_name["full fp32, one GPU"]
    assert eager.training.attention is None and sizes.attention.kind == "eager"
    assert (
        memory_of(Step(sizes, Training(method="lora", tokens=4096))).total
        > by_name["LoRA, one GPU + checkpointing"].memory.total
    )


@pytest.mark.parametrize("tokens", [1, 4096, 4097, 6000, 16384])
def test_a_batch_has_at_least_the_tokens_asked_for(tokens):
    planned, length = in_sequences(tokens)
    assert tokens <= planned < tokens + planned // length and length <= 4096 and planned % length == 0


def test_liger_is_planned_for_where_the_installed_one_knows_the_model():
    liger = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    assert set(LIGER) <= set(liger.MODEL_TYPE_TO_APPLY_LIGER_FN)
    missing = set(liger.MODEL_TYPE_TO_APPLY_LIGER_FN) & set(FAMILIES) - LIGER
    assert not missing


def kept_for_backward(config, tokens):
    """Count bytes a token that the first mixture-of-experts block of a model in bf16 keeps, without its weights."""
    model = build("nemotron_h", moe_latent_size=config.moe_latent_size).to(torch.bfloat16)
    sonicmoe_hf.patch_model(model)
    block = next(layer.mixer for layer in model.model.layers if hasattr(layer.mixer, "experts"))
    weights, kept = {p.untyped_storage().data_ptr() for p in block.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True))
    return sum(nbytes for _, nbytes in kept.values()) / tokens


def test_experts_that_read_a_latent_are_planned_with_its_size_and_all_else_with_the_models(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "eager")
    latent, plain = nemotron_h(), nemotron_h(moe_latent_size=None)
    sizes, of_plain = sizes_of(latent), sizes_of(plain)
    assert (sizes.hidden, sizes.experts_hidden) == (latent.hidden_size, latent.moe_latent_size) == (32, 24)
    assert of_plain.hidden == of_plain.experts_hidden == 32
    training = Training(method="full", tokens=64, sequence=64)
    more = Step(sizes, training).layer_bytes - Step(of_plain, training).layer_bytes
    assert more == kept_for_backward(latent, 64) - kept_for_backward(plain, 64)
    in_loss = [
        memory_of(Step(each, Training(method="lora", tokens=10**6, liger=False))).logits for each in (sizes, of_plain)
    ]
    assert in_loss[0] == in_loss[1]
    assert memory_of(Step(sizes, training)).activations > sizes.layers * 2 * 32 * 64, (
        "hidden states between layers, in bf16"
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_are_counted_exactly(family):
    config = CONFIGS[family]()
    sizes, model = sizes_of(config), AutoModelForCausalLM.from_config(config)
    assert sizes.total == sum(parameter.numel() for parameter in model.parameters())
    in_experts = [parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name]
    assert sizes.experts == sum(in_experts)
