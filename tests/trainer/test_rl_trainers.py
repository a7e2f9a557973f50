"""TRL's trainers of reinforcement learning and preferences are recognised; those that compare no
log-probabilities train."""

import importlib

import pytest
from helpers.marks import rest_pinned
from helpers.models import build
from helpers.training import arguments, trainer_for
from helpers.trl_trainers import model_of, sentence_tokenizer, trl_trainer, watched_training
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Seq2SeqTrainingArguments, Trainer
from trl import (
    DistillationConfig,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback, TokenRoundingCallback
from sonicmoe_hf.trainer.policy_trainers import policy_trainer

REFUSED = r"{name}: token rounding changes .* train it with top-k: leave TokenRoundingCallback out, or give it allow_policy_optimization=True"
PREFERENCES = [{"prompt": "the dog", "chosen": " jumps over the fox", "rejected": " does not mind at all"}] * 8
JUDGED = [{"prompt": "the dog", "completion": " jumps", "label": label} for label in (True, False)] * 4
PAIRS = [{name: row[name] for name in ("chosen", "rejected")} for row in PREFERENCES]
TEXTS = [{"text": "the quick brown fox jumps over the lazy dog"}] * 8


def rounding(**options):
    return TokenRoundingCallback(tile=8, min_tiles_per_expert=0, rounding="up", **options)


def reward(completions, **kwargs):
    return [float(len(text)) for text in completions]


def loaded(folder):
    """Load a model from a folder: TRL loads the reference from there."""
    model_of(sentence_tokenizer()).save_pretrained(folder / "model")
    return AutoModelForCausalLM.from_pretrained(folder / "model")


def make(trainer_class, config_class, rows, folder, callbacks, model=None, config=None, **options):
    model, words = model or loaded(folder), sentence_tokenizer()
    return trl_trainer(trainer_class, config_class, model, rows, folder, words, callbacks, config, **options)


GRPO = {
    "config": {"num_generations": 2, "max_completion_length": 4, "beta": 0.1, "num_iterations": 2},
    "reward_funcs": reward,
}
RLOO = {"config": {"num_generations": 2, "max_completion_length": 4}, "reward_funcs": reward}
POLICY_TRAINERS = {
    "DPO": (DPOTrainer, DPOConfig, PREFERENCES, {}),
    "KTO": (KTOTrainer, KTOConfig, JUDGED, {}),
    "GRPO": (GRPOTrainer, GRPOConfig, PREFERENCES, GRPO),
    "RLOO": (RLOOTrainer, RLOOConfig, PREFERENCES, RLOO),
}


@pytest.mark.parametrize("name", rest_pinned(POLICY_TRAINERS))
def test_the_callback_stops_a_policy_trainer_and_says_what_to_do(name, tmp_path):
    """The callback stops when the trainer is made; one that is added later, when it is attached
    or when training begins."""
    trainer_class, config, rows, options = POLICY_TRAINERS[name]
    with pytest.raises(ValueError, match=REFUSED.format(name=config.__name__)):
        make(trainer_class, config, rows, tmp_path, [rounding()], **options)
    trainer = make(trainer_class, config, rows, tmp_path, [], **options)
    trainer.add_callback(rounding())
    for begin, kind in ((lambda: sonicmoe_hf.attach(trainer), trainer_class), (trainer.train, config)):
        with pytest.raises(ValueError, match=REFUSED.format(name=kind.__name__)):
            begin()


@pytest.mark.parametrize("name", rest_pinned(["GRPO", "DPO"]))
def test_policy_trainers_train_with_top_k_or_if_told_to_with_rounding(name, tmp_path):
    trainer_class, config, rows, options = POLICY_TRAINERS[name]
    for callbacks, expected in ([ExpertLoadCallback()], False), ([rounding(allow_policy_optimization=True)], True):
        trainer = make(trainer_class, config, rows, tmp_path, callbacks, **options)
        assert watched_training(trainer)[True] == expected and trainer.state.global_step == 1


@pytest.mark.pinned
def test_a_rounding_set_by_patch_model_is_refused_by_the_load_callback(tmp_path):
    model = loaded(tmp_path)
    sonicmoe_hf.patch_model(model, routing="token_rounding")
    trainer = make(DPOTrainer, DPOConfig, PREFERENCES, tmp_path, [ExpertLoadCallback()], model=model)
    words = r'DPOConfig: .* train it with top-k: sonicmoe_hf.set_routing\(model, "top_k"\)'
    with pytest.raises(ValueError, match=words):
        trainer.train()


@pytest.mark.pinned
def test_rounding_makes_a_policy_differ_from_itself(tmp_path):
    """DPO's first step, where policy and reference are one model, should have no rewards: the error is about that."""
    rewards = {}
    for routing, callbacks in {"top_k": [], "rounding": [rounding(allow_policy_optimization=True)]}.items():
        trainer = make(DPOTrainer, DPOConfig, PREFERENCES, tmp_path, callbacks, config={"logging_steps": 1})
        trainer.train()
        log = trainer.state.log_history[0]
        rewards[routing] = abs(log["rewards/chosen"]) + abs(log["rewards/rejected"])
    assert rewards["top_k"] < 1e-5 < 1e-3 < rewards["rounding"]


@pytest.mark.parametrize(
    "trainer_class, config, rows", [(SFTTrainer, SFTConfig, TEXTS), (RewardTrainer, RewardConfig, PAIRS)]
)
def test_supervised_and_reward_trainers_round(trainer_class, config, rows, tmp_path):
    model = None
    if trainer_class is RewardTrainer:
        settings = loaded(tmp_path).config
        settings.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(settings)
    assert watched_training(make(trainer_class, config, rows, tmp_path, [rounding()], model=model))[True]


# names


EXPERIMENTAL = {
    "gmpo": ("GMPOConfig", True),
    "sdpo": ("SDPOConfig", True),
    "a2po": ("A2POConfig", True),
    "online_dpo": ("OnlineDPOConfig", True),
    "tpo": ("TPOConfig", True),
    "orpo": ("ORPOConfig", True),
    "cpo": ("CPOConfig", True),
    "sdft": ("SDFTConfig", True),
    "async_grpo": ("AsyncGRPOConfig", True),
    "iw_opd": ("IWOPDConfig", True),
    "gkd": ("GKDConfig", False),
    "gold": ("GOLDConfig", False),
}


@pytest.mark.parametrize("module", EXPERIMENTAL)
def test_trls_experimental_trainers_are_told_apart(module, tmp_path):
    name, is_policy_trainer = EXPERIMENTAL[module]
    try:
        package = importlib.import_module(f"trl.experimental.{module}")
    except ModuleNotFoundError as error:
        if error.name.startswith("trl"):
            raise
        pytest.skip(f"TRL's {module} needs {error.name}")
    config = object.__new__(getattr(package, name))
    trainer = object.__new__(getattr(package, name.replace("Config", "Trainer")))
    assert (policy_trainer(config) == name) == (policy_trainer(trainer) is not None) == is_policy_trainer


def test_names_decide_over_all_base_classes_and_ordinary_ones_are_let_through(tmp_path):
    class Mine(GRPOConfig):
        pass

    class CustomDPOTrainer(Trainer):
        """A DPOTrainer as LLaMA-Factory has it: its arguments are ordinary ones."""

    plain = [
        arguments(tmp_path),
        Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True),
        object.__new__(DistillationConfig),
        object.__new__(SFTConfig),
        object.__new__(RewardConfig),
    ]
    assert policy_trainer(object.__new__(Mine)) == "GRPOConfig"
    assert [policy_trainer(thing) for thing in plain] == [None] * len(plain)
    trainer = CustomDPOTrainer(build("qwen3_moe"), arguments(tmp_path), callbacks=[rounding()])
    with pytest.raises(ValueError, match="CustomDPOTrainer: token rounding"):
        sonicmoe_hf.attach(trainer)
    sonicmoe_hf.attach(trainer_for(build("qwen3_moe"), tmp_path, [rounding()]))
