"""Counts the defects that `sonicmoe-hf check` tells: adapters damaged at random, merged into a small model, in fp32 and
bf16.

    python -m benchmarks.quality.check_defects --draws 3

Writes results/check_defects.csv: of each kind of defect, size and dtype, how many draws were told ("applied" is the one
wrong answer) and of how many "cannot tell" was said. Then of adapters as they are ("none"), which change more or less of
the log-probabilities, 5.9 on average: "told" is the one wrong answer of these. "float32 of bfloat16" loads checkpoints in
bf16 by --dtype float32.
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.common.provenance import columns
from sonicmoe_hf import merge_adapter
from sonicmoe_hf.tools.checking.check import check_adapter
from sonicmoe_hf.tools.checking.hypotheses import AdaptedLayer, layers_of, whole_weights_of
from sonicmoe_hf.tools.checking.models import Loading

RESULTS = Path(__file__).parents[1] / "results" / "check_defects.csv"
NUM_LAYERS, NUM_EXPERTS, VOCABULARY = 4, 8, 256
SIZES = (1.0, 0.5, 0.2)  # of a part of the adapter that is missing
PARTS = ("float32", "bfloat16", "right")
WHOLE = "lm_head", "norm"
FACTORS = 0.1  # standard deviation of lora_B
LESS = (0.3, 0.05, 0.03, 0.02)  # of adapters whose change is more or less than that, without a defect


class Defect(NamedTuple):
    """A defect of an adapter, drawn at random.

    kept: of a layer's lora_B [out, r * experts], by which factor it is multiplied; None where the layer has no defect.
    whole: the module that was trained whole and is missing."""

    kind: str
    size: float
    kept: Callable[[AdaptedLayer], torch.Tensor | float | None]
    whole: str = ""


def draw(kind: str, size: float, draws: random.Random) -> Defect:
    """Draw where a defect of this kind is."""
    number, expert = str(draws.randrange(NUM_LAYERS)), draws.randrange(NUM_EXPERTS)
    target = draws.choice(["gate_up_proj", "down_proj", "q_proj", "o_proj"])
    half = draws.sample(range(NUM_EXPERTS), NUM_EXPERTS // 2)

    def of_experts(layer: AdaptedLayer, chosen: Iterable[int]) -> torch.Tensor | None:
        if layer.experts is None:
            return None
        is_chosen = torch.zeros(NUM_EXPERTS, dtype=torch.bool)
        is_chosen[list(chosen)] = True
        return 1 - size * is_chosen.repeat(layer.rank).float()  # PEFT's columns stand rank by rank

    kept: dict[str, Callable[[AdaptedLayer], torch.Tensor | float | None]] = {
        "the whole adapter": lambda layer: 1 - size,
        "one layer": lambda layer: 1 - size if layer.decoder_layer == number else None,
        "one layer's experts": lambda layer: (
            1 - size if layer.decoder_layer == number and layer.experts is not None else None
        ),
        "all experts": lambda layer: 1 - size if layer.experts is not None else None,
        "all beside the experts": lambda layer: 1 - size if layer.experts is None else None,
        "one target": lambda layer: 1 - size if layer.target == target else None,
        "one target of one layer": lambda layer: (
            1 - size if layer.target == target and layer.decoder_layer == number else None
        ),
        "half of the experts": lambda layer: of_experts(layer, half),
        "one expert of each layer": lambda layer: of_experts(layer, [expert]),
        "too large a scale": lambda layer: 1 + size,
    }
    if kind in WHOLE:
        return Defect(kind, 1.0, lambda layer: None, kind)
    return Defect(kind, size, kept[kind])


KINDS = (
    "the whole adapter",
    "too large a scale",
    "one layer",
    "one layer's experts",
    "all experts",
    "all beside the experts",
    "one target",
    "one target of one layer",
    "half of the experts",
    "one expert of each layer",
)


def write_base(folder: Path, tokenizer: PreTrainedTokenizerFast, dtype: str) -> None:
    """Save a model at random with weights of realistic size, and a tokenizer."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, head_dim=16,
        num_hidden_layers=NUM_LAYERS, num_attention_heads=4, num_key_value_heads=2, num_experts=NUM_EXPERTS,
        num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, initializer_range=0.1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_adapter(base: Path, folder: Path, whole: bool, factors: float = FACTORS) -> PeftModel:
    """Save an adapter on experts and attention, and a head and norm trained whole if asked; returns PEFT's model."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        modules_to_save=list(WHOLE) if whole else None,
    )
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (factors if "lora_B" in name else 0.01))
    adapted.save_pretrained(folder)
    return adapted


@torch.no_grad()
def write_defect(base: Path, adapted: PeftModel, defect: Defect, folder: Path) -> None:
    """Merge the adapter with the defect into `folder`, and leave the adapter as it was."""
    layers, kept = layers_of(adapted), []
    wrappers: list[Any] = [each.switch.__self__ for each in whole_weights_of(adapted, []) if each.name == defect.whole]
    for layer in layers:
        kept.append(layer.b.data)
        factor = defect.kept(layer)
        if factor is not None:
            layer.b.data = layer.b.data * factor
    saved = [(module, module.modules_to_save["default"].state_dict()) for module in wrappers]
    saved = [(module, {name: value.clone() for name, value in state.items()}) for module, state in saved]
    for module, _ in saved:
        module.modules_to_save["default"].load_state_dict(module.original_module.state_dict())
    with tempfile.TemporaryDirectory() as temporary:
        adapted.save_pretrained(temporary)
        merge_adapter(base, temporary, folder)
    for layer, b in zip(layers, kept):
        layer.b.data = b
    for module, state in saved:
        module.modules_to_save["default"].load_state_dict(state)


def measure(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    dtype: str,
    defects: list[Defect],
    factors: float = FACTORS,
    loaded: str = "auto",
) -> list[tuple[str, str]]:
    """Judge an adapter with each defect: kind and reason of the verdict. loaded: the dtype of `check`."""
    base, whole = folder / "base", any(defect.whole for defect in defects)
    if not base.exists():
        write_base(base, tokenizer, dtype)
    adapter = folder / f"adapter {whole} {factors}"
    adapted = write_adapter(base, adapter, whole, factors)
    places = []
    for number, defect in enumerate(defects):
        places.append(folder / f"merged {whole} {factors} {loaded} {number}")
        write_defect(base, adapted, defect, places[-1])
    result = check_adapter(
        str(base), str(adapter), [str(place) for place in places], text=text, loading=Loading(loaded)
    )
    print(f"mean change of log p: {result.change:.3f} over {result.tokens} tokens", flush=True)
    return [(place.verdict.kind, place.verdict.reason) for place in result.places]


NONE = Defect("none", 0.0, lambda layer: None)


def rows_of(
    defects: list[Defect], verdicts: list[tuple[str, str]], dtype: str, factors: float = FACTORS
) -> list[dict[str, Any]]:
    """Count the verdicts on each kind and size of defect."""
    counts: dict[tuple[str, float], Counter] = {}
    for defect, (kind, reason) in zip(defects, verdicts):
        print(dtype, factors, defect.kind, defect.size, kind, reason, flush=True)
        counts.setdefault((defect.kind, defect.size), Counter())[kind] += 1
    return [
        {
            "defect": defect, "size": size, "dtype": dtype, "factors": factors, "draws": count.total(),
            "told": count.total() - count["applied"] - count["cannot tell"],
            "cannot tell": count["cannot tell"], "applied": count["applied"], **columns(),
        }
        for (defect, size), count in counts.items()
    ]  # fmt: skip


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of words <0> to <255>."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<0>")


def write_text(path: Path, num_words: int, draws: random.Random, last: int = VOCABULARY - 1) -> str:
    """Write words that are drawn at random, of those up to `last`."""
    path.write_text(" ".join(f"<{draws.randint(1, last)}>" for _ in range(num_words)))
    return str(path)


def judge_damaged(folder: Path, text: str, dtype: str, num_draws: int, draws: random.Random) -> list[dict[str, Any]]:
    """Judge an adapter with defects, and one that has weights trained whole without those."""
    of_lora = [NONE, *(draw(kind, size, draws) for kind in KINDS for size in SIZES for _ in range(num_draws))]
    rows = []
    for defects in (of_lora, [NONE, *(draw(kind, 1.0, draws) for kind in WHOLE)]):
        rows += rows_of(defects, measure(folder, word_tokenizer(), text, dtype, defects), dtype)
    return rows


def judge_right(folder: Path, text: str) -> list[dict[str, Any]]:
    """Judge adapters of several sizes as they are, in bf16."""
    rows = []
    for factors in LESS:
        for name, loaded in (("bfloat16", "auto"), ("float32 of bfloat16", "float32")):
            verdicts = measure(folder, word_tokenizer(), text, "bfloat16", [NONE], factors, loaded)
            rows += rows_of([NONE], verdicts, name, factors)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3, help="of each kind and size")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    arguments = parser.parse_args()
    rows = []
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as temporary:
            folder, draws = Path(temporary), random.Random(f"{arguments.seed} {part}")
            text = write_text(folder / "text", 4096, draws)
            if part == "right":
                rows += judge_right(folder, text)
            else:
                rows += judge_damaged(folder, text, part, arguments.draws, draws)
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
