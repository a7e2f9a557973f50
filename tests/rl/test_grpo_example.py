"""examples/grpo.py: a task that is learned on a CPU, without vLLM and with one beside the trainer."""

import pytest
from helpers.examples import load as load_example
from helpers.marks import rest_pinned
from helpers.rl import GAP

FUNCTIONS = ["def fox(jumps):\n    return jumps\n", "def dog(mind):\n    return None\n"] * 4


def values(log, name="reward"):
    return [entry[name] for entry in log if name in entry]


@pytest.mark.slow
def test_the_reward_rises_in_a_minute_on_a_cpu(tmp_path):
    log = load_example("grpo").main(["--steps", "60", "--output", str(tmp_path)])
    rewards = values(log)
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    assert last > first + 0.15, f"{first:.2f} to {last:.2f}: 0.53 to 0.73 when this was written"
    assert (tmp_path / "checkpoint-60" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("packing", rest_pinned([["--experts-quantization", "nf4"], []]))
def test_the_example_samples_with_vllm(packing, engine, tmp_path, monkeypatch):
    example = load_example("grpo")
    monkeypatch.setattr(example, "standard_library", lambda: (FUNCTIONS, []))
    options = ["--steps", "2", "--max-completion-length", "4", "--output", str(tmp_path), *packing]
    log = example.main([*options, "--vllm", "colocate"])
    assert (max(values(log, "serving/largest_gap")) < GAP) == (not packing), "a base that is not rounded is elsewhere"
    with pytest.raises(SystemExit):
        example.main(["--model", "a model without a dataset"])
    url = example.vllm_options("http://localhost:8000")
    assert url["vllm_mode"] == "server" and example.vllm_options(None) == {}
