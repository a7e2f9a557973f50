"""GRPO with a stand-in for vLLM in the same process: it gets adapters alone, and the trainer replays its experts."""

import functools
import re

import pytest
import torch
from helpers.marks import rest_pinned
from helpers.rl import GAP, PROMPTS, logged_values, make, sync_once
from helpers.trl_trainers import sentence_tokenizer
from trl import GRPOTrainer as TRLsGRPOTrainer
from trl import RLOOConfig
from trl.chat_template_utils import qwen3_chat_template
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

import sonicmoe_hf
from sonicmoe_hf.private.replaced import REPLACED
from sonicmoe_hf.tools.autopatch.session import Session
from sonicmoe_hf.tools.autopatch.settings import RunSettings
from sonicmoe_hf.trl import GRPOTrainer, RLOOTrainer, vllm_adapters
from sonicmoe_hf.trl.trainers import ROUTING, ReplaysRouting


@pytest.mark.parametrize(
    "config, lora, is_3d",
    [
        ({"num_iterations": 2, "beta": 0.1, "max_steps": 4}, {"experts_r": 2}, False),
        pytest.param({"gradient_checkpointing": True}, {}, True, marks=pytest.mark.pinned),
    ],
)
def test_server_and_trainer_have_the_same_log_probabilities_as_the_adapter_changes(
    config, lora, is_3d, base, engine, tmp_path
):
    """The reference of beta is the policy with its adapter off, whose experts are replayed too."""
    trainer = make(GRPOTrainer, base, tmp_path, config, lora)
    trainer.train()
    gaps = logged_values(trainer)
    assert len(gaps) == 2 and 0 < max(gaps) < GAP
    assert logged_values(trainer, "serving/divergence") == [0.0, 0.0]
    assert max(logged_values(trainer, "serving/kl")) < 1e-9 and min(logged_values(trainer, "serving/sync_seconds")) > 0
    (llm,) = engine.made
    assert llm.options["enable_lora"] and llm.options["dtype"] == "float32"
    assert llm.options.get("enable_mixed_moe_lora_format", False) == is_3d
    assert len(llm.loaded) == 2 and llm.removed == llm.loaded[:1]
    assert sorted(path.name for path in (tmp_path / "adapters_for_vllm").iterdir()) == sorted(llm.loaded)


@pytest.mark.pinned
def test_a_server_that_keeps_the_first_adapter_is_far_away(base, engine, tmp_path):
    trainer = sync_once(make(GRPOTrainer, base, tmp_path))
    trainer.train()
    first, second = logged_values(trainer)
    assert first < GAP and second > 1e-2


@pytest.mark.slow
@pytest.mark.pinned
def test_several_epochs_sample_every_prompt_again_with_the_adapter_as_it_is(base, engine, tmp_path):
    config = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 16, "max_completion_length": 3}
    trainer = make(GRPOTrainer, base, tmp_path, config)
    trainer.train()
    assert trainer.state.epoch == 2 and trainer.state.global_step == len(engine.made[0].loaded) == 4
    assert 0 < max(logged_values(trainer)) < GAP and set(logged_values(trainer, "serving/divergence")) == {0.0}


def other_experts(complete):
    """Have a completion come with experts that no router chose: those with the numbers behind the chosen ones."""

    def completed(self, *args):
        completion = complete(self, *args)
        completion.routed_experts = (completion.routed_experts + 3) % 8
        return completion

    return completed


@pytest.mark.parametrize(
    "config",
    rest_pinned([{"mask_truncated_completions": True, "max_steps": 1}, {"num_iterations": 2, "max_steps": 2}]),
)
def test_the_experts_that_vllm_returned_are_used_in_scoring_and_in_every_update(
    config, base, engine, tmp_path, monkeypatch
):
    """TRL may mask completions that were cut off, as all are here."""
    monkeypatch.setattr(engine, "_complete", other_experts(engine._complete))
    trainer = make(GRPOTrainer, base, tmp_path, {"beta": 0.1, **config})
    used, given = [], []
    scored, computed = trainer._get_per_token_logps_and_entropies, trainer.compute_loss

    def watched(method, *args, **options):
        with sonicmoe_hf.record_routing(trainer.model) as routing:
            result = method(*args, **options)
        used.extend(routing.tensors())
        return result

    def watched_loss(model, inputs, *args, **options):
        given.append(inputs[ROUTING])
        return computed(model, inputs, *args, **options)

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *a, **o: watched(scored, *a, **o))
    monkeypatch.setattr(trainer, "compute_loss", watched_loss)
    trainer.train()
    assert len(used) == 2 + config["max_steps"] and len(given) == config["max_steps"]
    for number, calls in enumerate(used):
        expected = given[max(0, number - 2)].permute(2, 0, 1, 3).flatten(1, 2)
        known = expected >= 0
        rows = sorted(map(tuple, calls[known].view(-1, 2).tolist()))
        assert rows == sorted(map(tuple, expected[known].view(-1, 2).tolist())), "TRL shuffles what it hands out"
    assert given[0].dtype == torch.int16 and given[0].device.type == "cpu"
    assert min(logged_values(trainer, "serving/divergence")) > 0.5


@pytest.mark.pinned
def test_evaluation_samples_with_the_adapter_and_replays(base, engine, tmp_path):
    from datasets import Dataset

    evaluated = Dataset.from_list(PROMPTS[:4])
    config = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    trainer = make(GRPOTrainer, base, tmp_path, config, eval_dataset=evaluated)
    trainer.train()
    assert 0 <= max(logged_values(trainer, "eval_serving/largest_gap")) < GAP


@pytest.mark.pinned
def test_a_resumed_run_goes_on_with_new_versions_and_removes_what_a_killed_one_left(base, engine, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    make(GRPOTrainer, base, tmp_path, {**saving, "max_steps": 1}).train()
    folder = tmp_path / "adapters_for_vllm"
    prefix = next(folder.iterdir()).name.rpartition("-")[0]
    (folder / f".{prefix}-7").mkdir()
    (folder / f"{prefix}-7").mkdir()
    trainer = make(GRPOTrainer, base, tmp_path, saving)
    trainer.train(resume_from_checkpoint=True)
    assert engine.made[-1].loaded == [f"{prefix}-8"] and max(logged_values(trainer)) < GAP
    assert {path.name for path in folder.iterdir()} == {f"{prefix}-7", f"{prefix}-8"}


def test_sleep_is_at_level_1_and_what_slept_is_loaded_again(base, engine, tmp_path):
    """Level 2, which TRL asks for, drops the base."""
    trainer = make(GRPOTrainer, base, tmp_path, {"vllm_enable_sleep_mode": True, "max_steps": 1})
    llm = engine.made[0]
    reloaded = []
    trainer.vllm_generation.llm.load_again = lambda: reloaded.append(len(llm.slept))
    trainer.train()
    trainer.vllm_generation.generate([[5, 6, 7]], None, 1)
    assert set(llm.slept) == {1} and len(llm.slept) == 3 and reloaded == [2]


@pytest.mark.parametrize("mode, starts", [("colocate", "LLM"), ("server", "VLLMClient")])
def test_an_interrupted_constructor_puts_back_what_was_replaced(mode, starts, base, engine, tmp_path, monkeypatch):
    class Failing(vllm_generation.VLLMClient):
        init_communicator = vllm_generation.VLLMClient.init_communicator

        def __init__(self, *args, **options):
            registered.extend(each.name for each in REPLACED)
            raise KeyboardInterrupt

    monkeypatch.setattr(vllm_generation, starts, Failing)
    builder, connect, before, registered = grpo_trainer.VLLMGeneration, Failing.init_communicator, list(REPLACED), []
    with pytest.raises(KeyboardInterrupt):
        make(GRPOTrainer, base, tmp_path, {"vllm_mode": mode})
    assert grpo_trainer.VLLMGeneration is builder and getattr(vllm_generation, starts) is Failing
    assert Failing.init_communicator is connect
    assert "VLLMGeneration" in registered and before == REPLACED


@pytest.mark.pinned
@pytest.mark.slow
def test_rloo_and_replay_false_send_adapters_alone(base, engine, tmp_path):
    settings = {"num_generations": 2, "max_completion_length": 4, "max_steps": 2}
    rloo = make(RLOOTrainer, base, tmp_path / "rloo", settings, config_class=RLOOConfig)
    rloo.train()
    class_ = vllm_adapters(TRLsGRPOTrainer, replay=False, vllm_options={"enforce_eager": True})
    trainer = make(class_, base, tmp_path / "grpo")
    trainer.train()
    assert "serving/divergence" not in trainer.state.log_history[0] and max(logged_values(trainer)) < GAP
    for llm in engine.made:
        assert len(llm.loaded) == 2 and "enable_return_routed_experts" not in llm.options
    assert engine.made[1].options["enforce_eager"]


def test_without_vllm_the_policys_own_experts_are_replayed(base, tmp_path):
    class Mine(TRLsGRPOTrainer):
        given = ()

        def compute_loss(self, model, inputs, *args, **options):
            self.given = (*self.given, inputs)
            return super().compute_loss(model, inputs, *args, **options)

    config = {"use_vllm": False, "num_iterations": 2, "learning_rate": 1.0}
    trainer = make(vllm_adapters(Mine), base, tmp_path, config)
    assert re.fullmatch("Mine", type(trainer).__name__) and isinstance(trainer, Mine)
    trainer.train()
    first, second = trainer.given
    assert torch.equal(first[ROUTING], second[ROUTING]) and not logged_values(trainer)


def test_run_makes_a_trainer_of_the_programs_own_class_send_adapters_where_it_has_one(base, engine, tmp_path):
    """sitecustomize.py has it so: around TRL's constructor, inside that of a subclass."""
    session = Session(RunSettings())

    class Mine(TRLsGRPOTrainer):
        made = 0

        def __init__(self, *args, **options):
            self.made += 1
            session.make_grpo(self, functools.partial(super().__init__), args, options)

    trainer = make(Mine, base, tmp_path, {"max_steps": 1})
    trainer.train()
    assert trainer.made == 1 and isinstance(trainer, ReplaysRouting) and max(logged_values(trainer)) < GAP
    plain = make(Mine, base, tmp_path, {"use_vllm": False})
    assert type(plain) is Mine


def calling_a_tool(prompts, trainer):
    """Serve as TRL's rollout_func: two turns of the engine, and between them what a tool said, which nobody sampled."""
    tokenizer, generation = trainer.processing_class, trainer.vllm_generation
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    _, first, logs, _ = generation.generate(ids, None, 1)
    said = [7, 8]
    turns = [[*prompt, *own, *said] for prompt, own in zip(ids, first)]
    some = turns[::2]  # as a tool's loop goes on with those that called it
    _, second, more, _ = generation.generate(some, None, 1)
    completions, masks, every = [], [], []
    for number, own in enumerate(first):
        goes_on = number % 2 == 0
        then = second[number // 2] if goes_on else []
        completions.append([*own, *said, *then] if goes_on else own)
        masks.append([1] * len(own) + ([0, 0] + [1] * len(then) if goes_on else []))
        values = [step[0] for step in logs[number]]
        every.append([*values, 0.0, 0.0, *(step[0] for step in more[number // 2])] if goes_on else values)
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": every, "env_mask": masks}


@pytest.mark.pinned
def test_a_rollout_of_several_turns_is_paired_with_the_experts_of_its_last_one(base, engine, tmp_path):
    trainer = make(GRPOTrainer, base, tmp_path, {"max_steps": 1}, rollout_func=calling_a_tool)
    trainer.train()
    assert 0 < max(logged_values(trainer)) < GAP and logged_values(trainer, "serving/divergence") == [0.0]


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: the word.
    """
    return f"{word} is brown"


def calling(complete):
    """Have every other conversation begin with a call of the tool, and sample a few tokens in each turn."""
    call = '<tool_call>\n{"name": "look_up", "arguments": {"word": "fox"}}\n</tool_call>'

    def completed(self, prompt, parameters):
        self.turns = getattr(self, "turns", 0) + 1
        parameters.max_tokens = 6  # the call alone needs more
        if "<tool_response>" in self.words.decode(prompt) or self.turns % 2:
            return complete(self, prompt, parameters)
        return complete(self, prompt, parameters, forced=[*self.words(call)["input_ids"], self.eos])

    return completed


@pytest.mark.pinned
def test_trls_own_loop_of_tools_is_paired_with_the_experts_of_its_last_turn(base, engine, tmp_path, monkeypatch):
    words = sentence_tokenizer()
    words.chat_template = qwen3_chat_template
    monkeypatch.setattr(engine, "words", words, raising=False)
    monkeypatch.setattr(engine, "_complete", calling(engine._complete))
    rows = [{"prompt": [{"role": "user", "content": each["prompt"]}]} for each in PROMPTS]
    config = {
        "max_steps": 1,
        "max_completion_length": 400,
        "vllm_max_model_length": 2048,
        "max_tool_calling_iterations": 1,
    }
    trainer = make(GRPOTrainer, base, tmp_path, config, rows=rows, words=words, tools=[look_up])
    trainer.train()
    assert logged_values(trainer, "tools/call_frequency")[0] > 0 and logged_values(
        trainer, "tools/failure_frequency"
    ) == [0.0]
    assert 0 < max(logged_values(trainer)) < GAP and logged_values(trainer, "serving/divergence") == [0.0]
