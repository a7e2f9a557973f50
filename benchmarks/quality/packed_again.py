"""Measures how much of what was learned stays when a merged adapter is packed again, by format, learning rate and
rounding.

    python -m benchmarks.quality.packed_again [--bases gpt_oss:8 qwen3_moe:32] [--steps 200] [--seeds 3] [--csv FILE]
    python -m benchmarks.quality.packed_again --model outputs/upcycled    # a pretrained base, as examples/upcycle.py's

A small model of each architecture is trained in full on the standard library's sources, and all its experts are packed.
Adapters of the experts alone (r = 16, scale 2) are then trained on the C++ headers that PyTorch installs, and merged:

- nearest, dithered: packed again under the base's scales, as `merge --rounding` does.
- original: W + s B A of the weights before they were packed, packed anew.
- merge-aware: forward computes with what dithered merging would write, while gradients pass rounding unchanged
  (straight-through). An eager prototype: the library has no such training.

kept is (loss of the packed base - loss) / (loss of the packed base - loss of the plain adapter unmerged), on held-out
headers. kl is from the same adapter, unmerged. All arithmetic is in fp32, so weights alone differ. The CSV grows by an
adapter's rows at a time, and what it has already is not trained again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Rows, read_rows
from benchmarks.quality.qlora_curves import patch_and_balance, train
from sonicmoe_hf.kernels.packed import FORMATS, Format, Quantized
from sonicmoe_hf.kernels.packed.dither import Dither
from sonicmoe_hf.layer.experts_module import is_transposed, matrix_shape, packable, row_order
from sonicmoe_hf.tools.demo.corpus import blocks, held_out_apart, standard_library, train_tokenizer

VOCAB_SIZE, LENGTH, RANK, SCALE = 2048, 128, 16, 2.0
CELL = ("base", "format", "learning_rate", "seed")
HEADERS = ("c10", "torch/csrc/api")  # of torch/include
MERGE_AWARE = "merge-aware"
SIZES = {  # by device: a model's, rows of 128 tokens in a step, steps that train the base, held-out rows
    "cpu": ({"hidden_size": 64, "num_hidden_layers": 2, "expert_size": 64}, 4, 1000, 48),
    "cuda": ({"hidden_size": 512, "num_hidden_layers": 6, "expert_size": 256}, 32, 2000, 256),
}


class Weight(NamedTuple):
    """An experts' weight [E, N, K]: before it was packed, the values that it has then, in fp32, and packed.

    The experts are packed one below the other, as a single matrix [E * N, K], which is faster here; blocks stay within
    an expert, and NVFP4's second scale becomes that of all experts.
    """

    name: str
    original: torch.Tensor
    values: torch.Tensor
    format: Format
    packed: Quantized
    order: str
    is_transposed: bool

    def in_model_order(self, weight: torch.Tensor) -> torch.Tensor:
        """View a weight [E, N, K] as the model's parameter has it."""
        return weight.transpose(1, 2) if self.is_transposed else weight

    def uniform(self, seed: int) -> torch.Tensor:
        """Compute the numbers of a seed's dither [E * N, K]."""
        dither, (num_experts, *shape) = Dither(self.name, seed, self.order), self.values.shape
        return torch.cat([dither.uniform(expert, shape, self.values.device) for expert in range(num_experts)])

    def round(self, exact: torch.Tensor, uniform: torch.Tensor | None) -> torch.Tensor:
        """Round a changed weight [E, N, K] as merging does; to nearest without numbers."""
        matrix = self.format.round_expert(self.packed, 0, exact.flatten(0, 1), uniform)
        return matrix.values.view_as(exact)

    def pack_again(self, change: torch.Tensor) -> torch.Tensor:
        """Pack the changed original with scales of its own, and return its values."""
        packed = self.format.quantize((self.original + change).flatten(0, 1)[None])
        return self.format.dequantize(packed, torch.float32).view_as(change)


class StraightThrough(torch.autograd.Function):
    """Rounding whose gradient is that of no rounding."""

    @staticmethod
    def forward(ctx, exact, round_):
        return round_(exact)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class AdaptedModel(nn.Module):
    """A frozen model with adapters of its experts' weights; the forward has W + scale B A, or that rounded.

    seed: of A, as PEFT initialises it, and of the dither where rounds.
    """

    def __init__(self, model: nn.Module, weights: list[Weight], seed: int, rounds: bool):
        super().__init__()
        set_seed(seed)
        self.model, self.weights, self.rounds, self.fixed = model, weights, rounds, None
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for weight in weights:
            num_experts, size_out, size_in = weight.values.shape
            a = torch.empty(num_experts, RANK, size_in, device=weight.values.device)
            self.a.append(a.uniform_(-(size_in**-0.5), size_in**-0.5))
            self.b.append(a.new_zeros(num_experts, size_out, RANK))
        self.uniform = [weight.uniform(seed) for weight in weights]

    @property
    def device(self) -> torch.device:
        """Look up the model's device."""
        return self.model.device

    def changes(self) -> list[torch.Tensor]:
        """Compute scale B A [E, N, K] of each weight."""
        return [SCALE * (b @ a) for a, b in zip(self.a, self.b, strict=True)]

    def merge(self, round_: Callable) -> list[torch.Tensor]:
        """Merge each weight with its change as one of ROUNDINGS does, with the numbers of its dither."""
        with torch.no_grad():
            return [round_(*each) for each in zip(self.weights, self.changes(), self.uniform, strict=True)]

    def forward(self, **inputs):
        """Call the model with the weights of `fixed`, merged ones, or else with those that are trained."""
        values = self.fixed
        if values is None:
            values = [weight.values + change for weight, change in zip(self.weights, self.changes(), strict=True)]
            if self.rounds:
                dithered = [(lambda exact, w=w, u=u: w.round(exact, u)) for w, u in zip(self.weights, self.uniform)]
                values = [StraightThrough.apply(*each) for each in zip(values, dithered, strict=True)]
        own = {weight.name: weight.in_model_order(value) for weight, value in zip(self.weights, values, strict=True)}
        return functional_call(self.model, own, kwargs=inputs)


ROUNDINGS = {  # of merged weights, whose adapter was trained as ever
    "nearest": lambda weight, change, uniform: weight.round(weight.values + change, None),
    "dithered": lambda weight, change, uniform: weight.round(weight.values + change, uniform),
    "original": lambda weight, change, uniform: weight.pack_again(change),
}


@cache
def read_corpora(vocab_size: int = VOCAB_SIZE):
    """Read the standard library, to train on, and the C++ headers that PyTorch installs; returns their texts, and a
    tokenizer of both."""
    root = Path(torch.__file__).parent / "include"
    paths = [path for part in HEADERS for path in sorted((root / part).rglob("*.h"))]
    headers = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    texts, _ = standard_library()
    return texts, headers, train_tokenizer([*texts, *headers[::8]], vocab_size)


def config_of(architecture: str, num_experts: int, sizes: dict, tokenizer):
    """Make a config of an architecture; a quarter of the experts, at most 4, takes each token."""
    names = {
        "gpt_oss": ("num_local_experts", "intermediate_size"),
        "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    }
    experts, expert_size = names[architecture]
    heads = sizes["hidden_size"] // 32
    return AutoConfig.for_model(
        architecture,
        **{key: value for key, value in sizes.items() if key != "expert_size"},
        **{experts: num_experts, expert_size: sizes["expert_size"]},
        num_experts_per_tok=min(4, num_experts // 4),
        vocab_size=len(tokenizer),
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        initializer_range=0.05,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({"norm_topk_prob": True} if architecture == "qwen3_moe" else {"sliding_window": 64}),
    )


def train_base(name: str, options):
    """Train a base in full, as "gpt_oss:8" names it; returns it and its tokenizer."""
    architecture, num_experts = name.split(":")
    sizes, batch, steps, _ = SIZES[options.device]
    batch = options.rows or batch
    texts, _, tokenizer = read_corpora()
    set_seed(0)
    config = config_of(architecture, int(num_experts), sizes, tokenizer)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(options.device)
    with patch_and_balance(model):
        rows = blocks(texts, tokenizer, LENGTH)
        train(model, rows, options.start_steps or steps, 3e-3, 0, dtype=torch.float32, batch=batch)
    return model, tokenizer


def load_base(folder: Path, options):
    """Load a checkpoint and its tokenizer."""
    model = sonicmoe_hf.from_pretrained(folder, dtype=torch.float32).to(options.device)
    return model, AutoTokenizer.from_pretrained(folder)


def pack_weights(model, format: Format) -> list[Weight]:
    """Pack the weights of all experts."""
    weights = []
    for module_name, module in model.named_modules():
        for own in packable(module):
            original = getattr(module, own).detach()
            original = (original.transpose(1, 2) if is_transposed(module) else original).float()
            assert tuple(original.shape) == matrix_shape(module, getattr(module, own))
            name, order = f"{module_name}.{own}", row_order(module, own)
            packed = format.quantize(original.flatten(0, 1)[None])
            values = format.dequantize(packed, torch.float32).view_as(original)
            weights.append(Weight(name, original, values, format, packed, order, is_transposed(module)))
    return weights


@torch.no_grad()
def evaluate(model, rows, batch: int) -> tuple[float, torch.Tensor]:
    """Compute the mean loss of held-out rows, and log-probabilities [tokens, vocabulary]."""
    model.eval()
    ids = torch.stack([row["input_ids"] for row in rows]).to(model.device)
    parts = [model(input_ids=some).logits[:, :-1].float().log_softmax(-1).flatten(0, 1) for some in ids.split(batch)]
    predictions = torch.cat(parts)
    return -predictions.gather(1, ids[:, 1:].reshape(-1, 1)).mean().item(), predictions


def mean_kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Compute the mean KL divergence of a token's predictions from those of the reference."""
    parts = zip(reference.split(1024), other.split(1024), strict=True)
    return sum((one.exp() * (one - two)).sum().item() for one, two in parts) / len(reference)


class Trial:
    """A base, the texts of its adapters, and the table."""

    def __init__(self, name: str, options):
        self.name, self.options, self.batch = name, options, options.rows or SIZES[options.device][1]
        model, tokenizer = load_base(options.model, options) if options.model else train_base(name, options)
        self.model = model.requires_grad_(False)
        sonicmoe_hf.patch_model(self.model)
        texts, held_out = held_out_apart(read_corpora()[1])
        self.rows, held_out = (blocks(part, tokenizer, LENGTH) for part in (texts, held_out))
        self.held_out = held_out[:: max(1, len(held_out) // (options.held_out or SIZES[options.device][3]))]
        self.table = Rows(options.csv, CELL)
        loss, _ = evaluate(self.model, self.held_out, self.batch)
        print(f"{name}: held-out loss {loss:.4f} of headers before packing", flush=True)

    def run(self, name: str, rate: float, seed: int) -> None:
        """Train adapters over a format, plain and merge-aware, and add what each rounding keeps."""
        weights = pack_weights(self.model, FORMATS[name])
        plain = AdaptedModel(self.model, weights, seed, rounds=False)
        base, _ = evaluate(plain, self.held_out, self.batch)
        self._train(plain, rate, seed)
        unmerged, reference = evaluate(plain, self.held_out, self.batch)
        changes = zip(plain.changes(), weights, strict=True)
        ratios = [(change.square().sum() / weight.values.square().sum()).item() for change, weight in changes]
        about = {"base": self.name, "format": name, "learning_rate": f"{rate:g}", "seed": seed}
        about["change_pct"] = f"{100 * (sum(ratios) / len(ratios)) ** 0.5:.2f}"

        def add(rounding: str, loss: float, divergence: float) -> None:
            kept = 100 * (base - loss) / (base - unmerged)
            self.table.add(
                **about, rounding=rounding, held_out_loss=f"{loss:.5f}", kept_pct=f"{kept:.1f}", kl=f"{divergence:.5f}"
            )

        add("base", base, 0.0)
        add("unmerged", unmerged, 0.0)
        for rounding, round_ in ROUNDINGS.items():
            plain.fixed = plain.merge(round_)
            loss, predictions = evaluate(plain, self.held_out, self.batch)
            add(rounding, loss, mean_kl(reference, predictions))
        aware = AdaptedModel(self.model, weights, seed, rounds=True)
        self._train(aware, rate, seed)
        aware.fixed = aware.merge(ROUNDINGS["dithered"])  # what forward computed with
        merged, predictions = evaluate(aware, self.held_out, self.batch)
        aware.rounds, aware.fixed = False, None
        loss, latent = evaluate(aware, self.held_out, self.batch)
        add(MERGE_AWARE, merged, mean_kl(latent, predictions))
        add(f"{MERGE_AWARE}, unmerged", loss, 0.0)
        self.table.write()

    def _train(self, adapted: AdaptedModel, rate: float, seed: int) -> None:
        train(adapted, self.rows, self.options.steps, rate, seed, dtype=torch.float32, batch=self.batch)


def main() -> None:
    parser = Command(__doc__, "packed_again.csv", needs_gpu=False)
    parser.add_argument("--bases", nargs="+", default=["gpt_oss:8", "gpt_oss:32", "qwen3_moe:8", "qwen3_moe:32"])
    parser.add_argument("--model", type=Path, help="a checkpoint's folder in place of --bases")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["mxfp4", "nvfp4", "nf4", "int4", "fp8"])
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-4, 3e-3])
    parser.add_argument("--start-steps", type=int, help="that train a base; default: 1000 on a CPU, 2000 on a GPU")
    parser.add_argument("--steps", type=int, default=200, help="of the adapters")
    parser.add_argument("--held-out", type=int, help="rows to evaluate; default: 48 on a CPU, 256 on a GPU")
    parser.add_argument("--rows", type=int, help="of 128 tokens in a step; default: 4 on a CPU, 32 on a GPU")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    done = {tuple(row[key] for key in CELL) for row in read_rows(options.csv)}
    names = [options.model.name] if options.model else options.bases
    seeds = range(1, 1 + options.seeds)
    trials: dict[str, Trial] = {}
    for seed, format, rate, name in itertools.product(seeds, options.formats, options.rates, names):
        if (name, format, f"{rate:g}", str(seed)) not in done:
            if name not in trials:
                trials[name] = Trial(name, options)
            trials[name].run(format, rate, seed)


if __name__ == "__main__":
    main()
