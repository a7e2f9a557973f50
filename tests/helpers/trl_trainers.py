"""TRL's trainers on a CPU, and tokenizers for what they train on."""

import torch
from datasets import Dataset
from helpers.models import VOCABULARY, build
from helpers.training import Watch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import sonicmoe_hf
from sonicmoe_hf.tools.demo.corpus import train_tokenizer

SENTENCE = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all"


def word_tokenizer(word="w{}"):
    """Make a tokenizer of the words w0 (padding), w1, w2 (the end), ..., each a token of its number. It finds special
    tokens in longer words, the end in w21; not where `word` has an end of its own."""
    words = Tokenizer(WordLevel({word.format(i): i for i in range(VOCABULARY)}, unk_token=word.format(3)))
    words.pre_tokenizer = WhitespaceSplit()
    pad, end, unknown = map(word.format, (0, 2, 3))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token=end, unk_token=unknown)


def sentence_tokenizer():
    """Make a tokenizer of the byte pairs of SENTENCE."""
    made = train_tokenizer([SENTENCE], 300)
    made.pad_token = made.pad_token or made.eos_token
    return made


def model_of(words, **sizes):
    """Build a small model of this tokenizer's vocabulary."""
    ids = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    return build("qwen3_moe", vocab_size=len(words), **ids, **sizes)


def watched_training(trainer) -> dict[bool, bool]:
    """Attach and train; by whether gradients were computed: whether tokens were rounded."""
    sonicmoe_hf.attach(trainer)
    watch = Watch(trainer.model, note=torch.is_grad_enabled)
    trainer.train()
    return watch.rounded_by_note()


def trl_trainer(trainer_class, config_class, model, rows, folder, words, callbacks=(), config=None, **options):
    """Make a trainer of one step in fp32, unless `config` says otherwise, which reports and saves nothing."""
    settings = {
        "use_cpu": True,
        "bf16": False,
        "max_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        **(config or {}),
    }
    return trainer_class(
        model,
        args=config_class(str(folder), **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=words,
        callbacks=list(callbacks),
        **options,
    )
