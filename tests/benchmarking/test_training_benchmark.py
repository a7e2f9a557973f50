"""benchmarks/step/train_step.py at a tiny size: what its figures rest on."""

import csv
import sys
from unittest import mock

import matplotlib
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from benchmarks import charts
from benchmarks.step import run, step_parts, train_step
from benchmarks.step.models import SpreadLoad

matplotlib.use("Agg")
pytestmark = [pytest.mark.pinned, pytest.mark.slow]

TINY = ("--device", "cpu", "--tiny", "--tokens", "64", "--layers", "1", "--steps", "1", "--rounds", "1")


def measured(path, *arguments):
    """Read the medians of a run, by (contender, mode, metric)."""
    with mock.patch.object(sys, "argv", ["train_step.py", *TINY, "--csv", str(path), *arguments]):
        train_step.main()
    with open(path, newline="") as file:
        return {(row["contender"], row["mode"], row["metric"]): float(row["median"]) for row in csv.DictReader(file)}


def test_every_contender_trains_the_same_model_on_the_same_tokens(tmp_path, capsys):
    found = measured(tmp_path / "a.csv", "--contender", "grouped_mm", "--contender", "sonicmoe-hf")
    theirs, ours = (found[name, "full", "loss"] for name in ("grouped_mm", "sonicmoe-hf"))
    assert ours == pytest.approx(theirs, abs=2e-3)  # bf16 rounds their sums in other places
    assert found["sonicmoe-hf", "full", "tokens_per_s"] == pytest.approx(
        64e3 / found["sonicmoe-hf", "full", "ms"], rel=1e-3
    )
    assert "Qwen3-30B-A3B  1,64  sonicmoe-hf  full  plain  ms " in capsys.readouterr().out


def test_each_round_begins_with_another_contender_and_all_rounds_are_in_the_rows(tmp_path, monkeypatch):
    order, time_steps = [], train_step.time_steps
    monkeypatch.setattr(
        train_step,
        "build_compiled",
        lambda run, options, build=train_step.build_compiled: order.append(run) or build(run, options),
    )
    milliseconds = iter([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])
    monkeypatch.setattr(
        train_step, "time_steps", lambda *given: time_steps(*given)._replace(milliseconds=next(milliseconds))
    )
    chosen = ("--contender", "grouped_mm", "--contender", "sonicmoe-hf", "--rounds", "3")
    found = measured(tmp_path / "a.csv", *chosen)
    ours, theirs = "sonicmoe-hf", "grouped_mm"
    assert [run.contender for run in order] == [theirs, ours, ours, theirs, theirs, ours]
    assert (found[theirs, "full", "ms"], found[ours, "full", "ms"]) == (8.0, 4.0)


def test_packed_experts_train_and_a_contender_without_them_is_left_out(tmp_path, capsys):
    chosen = ("--mode", "QLoRA", "--contender", "grouped_mm", "--contender", "sonicmoe-hf", "--varying-lengths")
    found = measured(tmp_path / "a.csv", *chosen)
    assert {contender for contender, _, _ in found} == {"sonicmoe-hf"}
    assert "grouped_mm has no packed experts" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["Qwen3.5-35B-A3B", "Nemotron-3-Nano-30B-A3B"])
def test_models_of_other_kinds_train_and_say_who_computed_their_linear_attention(tmp_path, capsys, model):
    chosen = ("--model", model, "--mode", "LoRA", "--mode", "QLoRA", "--contender", "sonicmoe-hf", "--layers", "2")
    found = measured(tmp_path / "a.csv", *chosen)
    for mode in ("LoRA", "QLoRA"):
        assert found["sonicmoe-hf", mode, "loss"] == pytest.approx(4.17, abs=0.1)  # ln 64
    packages = {"Qwen3.5-35B-A3B": "causal_conv1d fla", "Nemotron-3-Nano-30B-A3B": "causal_conv1d mamba_ssm"}
    expected = ", ".join(f"torch for {package}" for package in packages[model].split())
    with open(tmp_path / "a.csv", newline="") as file:
        assert {row["launch"] for row in csv.DictReader(file)} == {expected}
    assert capsys.readouterr().out.count("largest error of a gradient") == 2


def test_a_model_that_liger_does_not_know_gets_its_loss_alone(tmp_path, monkeypatch):
    pytest.importorskip("liger_kernel")
    from liger_kernel.transformers.model import loss_utils

    given = []

    def loss(hidden, weight, labels, hidden_size):
        given.append((hidden.shape, weight.shape, hidden_size))
        return F.cross_entropy((hidden @ weight.T).float()[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    chosen = ("--model", "Qwen3.5-35B-A3B", "--mode", "frozen", "--contender", "grouped_mm", "--layers", "2")
    expected = measured(tmp_path / "a.csv", *chosen)
    monkeypatch.setattr(loss_utils, "LigerForCausalLMLoss", loss)
    found = measured(tmp_path / "b.csv", *chosen, "--liger")
    assert set(given) == {((1, 64, 64), (64, 64), 64)}
    assert found["grouped_mm", "frozen", "loss"] == pytest.approx(expected["grouped_mm", "frozen", "loss"], abs=2e-3)
    assert "Liger's loss, torch for" in (tmp_path / "b.csv").read_text()


def test_a_package_that_is_here_is_named_in_place_of_torch(monkeypatch):
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

    def wrapped():
        return func_name, package, is_new_implementation

    func_name, package, is_new_implementation = "chunk_gated_delta_rule", "fla", True
    monkeypatch.setattr(modeling_qwen3_5_moe, "torch_chunk_gated_delta_rule", wrapped)
    monkeypatch.delattr(modeling_qwen3_5_moe, "torch_recurrent_gated_delta_rule")
    assert train_step.models.kernels_of("Qwen3.5-35B-A3B") == ["torch for causal_conv1d", "fla"]


def test_a_wrong_gradient_stops_the_benchmark_before_it_times(tmp_path, monkeypatch):
    patch_model = run.sonicmoe_hf.patch_model

    def wrong(model, routing, **options):
        model.model.layers[0].mlp.experts.down_proj.data.mul_(2)
        return patch_model(model, routing, **options)

    monkeypatch.setattr(run.sonicmoe_hf, "patch_model", wrong)
    with pytest.raises(SystemExit, match="ours, its own attention computes another gradient of"):
        measured(tmp_path / "a.csv", "--contender", "sonicmoe-hf")
    assert not (tmp_path / "a.csv").exists()


def test_a_profile_finds_every_part_of_a_step(tmp_path):
    found = measured(tmp_path / "a.csv", "--profile", "--contender", "sonicmoe-hf")
    on_host = {
        metric.removesuffix(": host ms"): v for (_, _, metric), v in found.items() if metric.endswith("host ms")
    }
    for part in ("experts: the rest", "router", "MoE block: the rest", "attention", "norms", "loss", "optimiser"):
        assert on_host[part] > 0, part
    assert sum(on_host.values()) <= found["sonicmoe-hf", "full", "wall ms"]


def event(category, name, start, duration, thread, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "args": args}


def launched(name, start, thread, duration, number):
    """Make a kernel that takes `duration`, and its launch at `start`."""
    launch = event("cuda_runtime", "cudaLaunchKernel", start, 1, thread, correlation=number)
    return [launch, event("kernel", name, start + 1000, duration, 7, correlation=number)]


def test_a_kernel_belongs_to_the_innermost_part_and_in_backward_to_the_part_that_made_its_node():
    backward = "autograd::engine::evaluate_function: Backward"
    events = [
        event("user_annotation", "part:MoE block: the rest", 0, 100, 1),
        event("user_annotation", "part:router", 10, 30, 1),
        event("user_annotation", "part:experts: the rest", 50, 40, 1),
        event("cpu_op", "aten::no_node", 5, 1, 1, **{"Sequence number": 3, "Fwd thread id": 0}),
        event("cpu_op", "aten::linear", 12, 9, 1, **{"Sequence number": 3, "Fwd thread id": 0}),
        event("cpu_op", "Plain", 52, 30, 1, **{"Sequence number": 4, "Fwd thread id": 0}),
        *launched("gemv", 13, 1, 8, 1),
        *launched("kernel_cutlass_up", 60, 1, 100, 2),
        *launched("combine_kernel(float)", 62, 1, 20, 3),
        *launched("add", 95, 1, 2, 4),
        event("cpu_op", backward, 200, 50, 2, **{"Sequence number": 4, "Fwd thread id": 1}),
        event("cpu_op", backward, 260, 20, 2, **{"Sequence number": 3, "Fwd thread id": 1}),
        event("cpu_op", backward, 290, 10, 2),
        *launched("gemm_wgrad_kernel", 210, 2, 200, 5),
        *launched("gemv", 270, 2, 16, 6),
        *launched("accumulate", 295, 2, 4, 7),
    ]
    parts = step_parts.attribute(events, steps=2)
    found = {part: round(2e3 * ms) for part, ms in parts.gpu.items()}
    assert found == {
        step_parts.ROUTER: 24,
        step_parts.PRODUCTS: 300,
        step_parts.COMBINE: 20,
        step_parts.BLOCK: 2,
        step_parts.REST: 4,
    }
    assert parts.outside(step_parts.PRODUCTS) == pytest.approx(46 / 346)
    assert parts.outside(step_parts.PRODUCTS, step_parts.COMBINE) == pytest.approx(26 / 346)
    assert {part: round(2e3 * ms) for part, ms in parts.host.items()} == {
        step_parts.ROUTER: 50,
        step_parts.EXPERTS: 90,
        step_parts.BLOCK: 30,
        step_parts.REST: 10,
    }
    assert parts.kernels[step_parts.ROUTER, "gemv"][1] == 1.0  # launches a step


def test_the_chart_shows_what_was_measured_of_one_commit(tmp_path):
    common = {"config": "7B", "launch": "Liger", "mode": "full", "gpu": "a GPU", "commit": "1"}
    rows = [
        {**common, "contender": contender, "metric": metric, "median": "2.5"}
        for contender in ("grouped_mm", "sonicmoe-hf")
        for metric in ("tokens_per_s", "peak_GiB")
    ]
    path = tmp_path / "train_step.csv"

    def write(rows):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)

    write([*rows, {**rows[0], "mode": "LoRA", "commit": "2"}])
    medians, origin = charts.read_medians(path, charts.STEP)
    assert origin["commit"] == "1" and len(medians) == 4
    charts.draw(charts.STEP, path, tmp_path / "images" / "chart.png")
    assert (tmp_path / "images" / "chart.png").stat().st_size > 1000
    write([*rows, {**rows[0], "commit": "2"}])
    with pytest.raises(ValueError, match="mixes runs"):
        charts.read_medians(path, charts.STEP)


def test_the_chart_of_few_tokens_has_a_panel_for_each_mode(tmp_path):
    lines = ["config,shape,contender,mode,launch,metric,median,gpu,commit"]
    for shape, mode in (("2,64", "full"), ("2,128", "full"), ("4,64", "LoRA")):
        for contender, launch in (("grouped_mm", "eager"), ("sonicmoe-hf", "reduce-overhead")):
            lines += [
                f'Qwen3,"{shape}",{contender},{mode},{launch},{metric},9,a GPU,1' for metric in ("ms", "busy_ms")
            ]
    (tmp_path / "small_batches.csv").write_text("\n".join(lines))
    charts.draw_small_batches(tmp_path / "small_batches.csv", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


def test_rows_are_those_of_a_balanced_model_where_tokens_are_alike_and_sigmoids_saturate():
    hidden, num_experts = 1024, 64
    config = AutoConfig.for_model("deepseek_v3", hidden_size=hidden, n_routed_experts=num_experts)
    router = DeepseekV3TopkRouter(config)
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(router.weight, std=0.02 * 7**0.5, generator=generator)  # logits as with 7,168 inputs
    x = 0.9 * torch.randn(hidden, generator=generator) + 0.43 * torch.randn(2048, hidden, generator=generator)

    def busiest():
        load = torch.bincount(router(x)[2].flatten(), minlength=num_experts).float()
        return (load.max() / load.mean()).item()

    assert busiest() > 5
    router.register_forward_pre_hook(SpreadLoad())
    assert busiest() < 1.5  # chance alone gives 1.15
