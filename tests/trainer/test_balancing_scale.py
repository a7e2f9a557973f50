"""LoadBalancing(per_layer_loss=...) is scaled as the training loss is, whoever computes that: the
model, the Trainer or TRL."""

import pytest
import torch
from helpers.marks import crossed, rest_pinned
from helpers.models import CONFIGS, assert_all_close, build, twin
from helpers.training import Examples, arguments
from helpers.trl_trainers import SENTENCE, model_of, sentence_tokenizer, trl_trainer
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import sonicmoe_hf
from sonicmoe_hf import LoadBalancing

WEIGHT = 0.5
ONE_STEP = {"max_steps": 1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1.0}
DIFFERENCES = "fp32: the difference of two steps of weights of size 1"


class Calls:
    """The arguments of every training call of the model, on whose loss backward is called."""

    def __init__(self, model):
        self.kwargs = []
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model, args, kwargs):
        if model.training and torch.is_grad_enabled():
            self.kwargs.append({name: kwargs[name] for name in ("input_ids", "attention_mask")})


def balancing_gradients(model, calls, shares):
    """Compute the gradients of each call's balancing loss by Transformers' function, one layer at a time, summed by its
    share."""
    config = model.config
    for inputs, share in zip(calls, shares, strict=True):
        router_logits = model.model(**inputs, output_router_logits=True).router_logits
        sizes = config.num_experts, config.num_experts_per_tok, inputs["attention_mask"]
        losses = [load_balancing_loss_func((logits,), *sizes) for logits in router_logits]
        (share * WEIGHT * sum(losses) / len(losses)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def assert_balanced_by(model, make, shares, attach=True):
    """Check that one optimiser step of SGD at rate 1 has, beside what it has without balancing, each call's balancing
    loss times its share; `shares` is a list or a function of the calls."""
    results = []
    for callbacks in ([], [LoadBalancing(per_layer_loss=WEIGHT)]):
        trained = twin(model)
        sonicmoe_hf.patch_model(trained)
        torch.manual_seed(0)
        trainer = make(trained, callbacks)
        if attach:
            sonicmoe_hf.attach(trainer)
        calls = Calls(trained)
        trainer.train()
        results.append(dict(trained.named_parameters()))
    plain, balanced = results
    expected = balancing_gradients(twin(model), calls.kwargs, shares(calls.kwargs) if callable(shares) else shares)
    assert len(expected) > 5
    assert_all_close({name: plain[name] - balanced[name] for name in expected}, expected, 2e-4, DIFFERENCES)


def shares_of_labels(columns, shift):
    """Compute each micro-batch's part of the labels that are not -100, for two micro-batches of two rows."""
    counts = [(columns["labels"][rows, shift:] != -100).sum() for rows in (slice(0, 2), slice(2, 4))]
    return [count / sum(counts) for count in counts]


def mean_of_the_labels(outputs, labels, num_items_in_batch):
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def maker(folder, data, trainer_class=Trainer, settings=None, **options):
    """Make a function that makes a Trainer of a model with callbacks, of one step of SGD."""
    settings = arguments(folder, **{**ONE_STEP, **(settings or {})})
    return lambda model, callbacks: trainer_class(model, settings, train_dataset=data, callbacks=callbacks, **options)


@pytest.mark.parametrize(
    "options", rest_pinned([{"settings": {"label_smoothing_factor": 0.1}}, {"compute_loss_func": mean_of_the_labels}])
)
def test_a_loss_that_the_trainer_computes_gives_the_scale_once_attached(options, tmp_path):
    data = Examples(4, padding=True)
    make = maker(tmp_path, data, **options)
    assert_balanced_by(build("qwen3_moe"), make, shares_of_labels(data.columns, shift=1))
    words = r"as TRL's trainers and label smoothing do, call sonicmoe_hf.attach\(trainer\)"
    with pytest.raises(RuntimeError, match=words):
        make(build("qwen3_moe"), [LoadBalancing(per_layer_loss=WEIGHT)]).train()


class OfHalves(Trainer):
    """A trainer whose loss is made of two calls of the model, as GRPO's is of chunks, and is a mean."""

    loss_is_scaled_for_ga = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # what says so to Transformers 5.17

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        del inputs["labels"]
        halves = [{name: column[row : row + 1] for name, column in inputs.items()} for row in (0, 1)]
        return sum(model(**half).logits.square().mean() for half in halves)


@pytest.mark.pinned
def test_the_calls_of_one_loss_are_averaged(tmp_path):
    assert_balanced_by(build("qwen3_moe"), maker(tmp_path, Examples(4), OfHalves), [0.25] * 4)


class Classified(Examples):
    """Sequences with a class each, or one for each token."""

    def __init__(self, count, of_tokens):
        super().__init__(count, padding=True)
        kept = self.columns["labels"]
        self.columns["labels"] = torch.where(kept == -100, kept, kept % 3) if of_tokens else torch.arange(count) % 3


@pytest.mark.parametrize(
    "head, rows", crossed([AutoModelForSequenceClassification, AutoModelForTokenClassification], [1, 2], everywhere=1)
)
def test_a_classification_heads_loss_is_a_mean_and_counts_whole(head, rows, tmp_path):
    model = head.from_config(CONFIGS["qwen3_moe"](num_labels=3, classifier_dropout=0.0))
    model.model.load_state_dict(build("qwen3_moe").model.state_dict())
    data = Classified(2 * rows, head is AutoModelForTokenClassification)
    make = maker(tmp_path, data, settings={"per_device_train_batch_size": rows})
    assert_balanced_by(model, make, [1.0, 1.0], attach=False)  # the Trainer adds up the two calls' losses as they are


# TRL


def maker_of(trainer_class, config_class, rows, folder, words, config, **options):
    """Make a function that makes a trainer of a model with callbacks, of one step of SGD."""
    settings = {
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        **ONE_STEP,
        **config,
    }
    return lambda model, callbacks: trl_trainer(
        trainer_class, config_class, model, rows, folder, words, callbacks, settings, **options
    )


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated in `SFTTrainer`:FutureWarning")
@pytest.mark.parametrize("smoothing", rest_pinned([0.1, 0.0]))
def test_supervised_fine_tuning_by_trl_counts_micro_batches_by_their_tokens(smoothing, tmp_path):
    words, rows = sentence_tokenizer(), [{"text": SENTENCE[: 20 + 15 * number]} for number in range(4)]
    config = {"label_smoothing_factor": smoothing}
    if smoothing:
        config["loss_type"] = "nll"  # TRL 1.14 cannot smooth labels in chunks
    make = maker_of(SFTTrainer, SFTConfig, rows, tmp_path, words, config)

    def shares(calls):
        tokens = [call["attention_mask"][:, 1:].sum() for call in calls]
        assert len(calls) == 2 and tokens[0] != tokens[1]
        return [count / sum(tokens) for count in tokens]

    assert_balanced_by(model_of(words), make, shares)


def test_grpo_averages_its_micro_batches(tmp_path):
    words = sentence_tokenizer()
    config = {"num_generations": 2, "max_completion_length": 4}
    options = {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]}
    make = maker_of(GRPOTrainer, GRPOConfig, [{"prompt": "the dog"}] * 4, tmp_path, words, config, **options)
    assert_balanced_by(model_of(words), make, [0.5, 0.5])
