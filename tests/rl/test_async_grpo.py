"""AsyncGRPOTrainer: TRL sends the adapters of experts that it refuses by itself, and never whole
weights in their place."""

from types import SimpleNamespace

import pytest
from datasets import Dataset
from helpers.rl import PROMPTS, lengths, load
from helpers.trl_trainers import sentence_tokenizer
from helpers.vllm_stand_in import serving
from peft import LoraConfig

import sonicmoe_hf

of_trl = pytest.importorskip(
    "trl.experimental.async_grpo", reason="TRL 1.14 needs aiohttp for it", exc_type=ImportError
)
async_grpo_trainer = of_trl.async_grpo_trainer
FUNCTIONS = ("validate_lora_for_vllm_sync", "save_lora_adapter")


@pytest.fixture
def built(base, tmp_path, monkeypatch):
    """Make a constructor of trainers of a server, whose rollouts nobody makes."""
    # TRL looks up a GPU's speed, and vLLM for sending whole weights
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *args: 1e12, raising=False)
    monkeypatch.setattr(of_trl.weight_transfer, "is_vllm_available", lambda **options: True)

    def build(server, **options):
        worker = SimpleNamespace(rollout_buffer=None, update_model_version=lambda version: None)
        config = {"model_init_kwargs": {"dtype": "float32"}, "max_staleness": 0, "max_steps": 1, "report_to": []}
        config |= {"use_cpu": True, "bf16": False, "vllm_server_base_url": server.url}
        return sonicmoe_hf.trl.AsyncGRPOTrainer(
            str(base), reward_funcs=lengths, args=of_trl.AsyncGRPOConfig(str(tmp_path), **config),
            train_dataset=Dataset.from_list(PROMPTS), processing_class=sentence_tokenizer(), rollout_worker=worker,
            **{"peft_config": sonicmoe_hf.lora_config(load(base), r=4), **options},
        )  # fmt: skip

    return build


def test_each_sync_loads_an_adapter_of_experts_by_a_new_name(built, base):
    before = [getattr(async_grpo_trainer, name) for name in FUNCTIONS]
    with serving(base) as server:
        trainer = built(server)
        for _ in range(2):
            trainer._sync_weight()
    assert server.llm.loaded == ["trl-policy-v1", "trl-policy-v2"] and list(server.requests) == ["trl-policy-v2"]
    assert any("experts" in name and "lora" in name for name, _ in server.llm.model.named_parameters())
    assert [getattr(async_grpo_trainer, name) for name in FUNCTIONS] == before


@pytest.mark.parametrize("answers", [{"lora_config": None}, {"parallel_config": {"data_parallel_size": 2}}])
def test_a_server_to_which_trl_would_send_whole_weights_is_refused(answers, built, base):
    with (
        serving(base, **answers) as server,
        pytest.raises(ValueError, match=r"whole weights.*vllm serve .*one replica"),
    ):
        built(server)


def test_no_adapter_one_that_vllm_serves_in_part_and_a_function_that_has_gone_are_refused(built, base, monkeypatch):
    with serving(base) as server:
        with pytest.raises(ValueError, match="the model has none; give peft_config="):
            built(server, peft_config=None)
        with pytest.raises(RuntimeError, match="vLLM leaves out what use_dora=True trains"):
            built(server, peft_config=LoraConfig(target_modules=["q_proj"], use_dora=True))
        monkeypatch.setattr(async_grpo_trainer, "save_lora_adapter", lambda model, folder: None)
        with pytest.raises(
            RuntimeError, match=r"has no .*save_lora_adapter\(model, accelerator, .* are model, folder; install"
        ):
            built(server)
