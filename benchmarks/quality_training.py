"""One run of token_rounding_quality.py: a small Qwen3-MoE model trained from scratch by one routing method.

Within a seed every method starts from the same weights and sees the same batches in the same order; the model is patched
as a user would patch it, and evaluated, always with top-k, on files that training never saw.

Letters: T tokens of a batch, E experts, K experts per token, C an expert's capacity in rows.
"""

from __future__ import annotations

import hashlib
import math
import platform
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import sonicmoe_hf
from sonicmoe_hf.config import ROUNDINGS, TokenRounding
from sonicmoe_hf.demo.corpus import train_tokenizer
from sonicmoe_hf.patching.support import find_layers
from sonicmoe_hf.routing import Routing

METHODS = ("top_k", *ROUNDINGS, "token_drop", "expert_choice")
DROP_CAPACITY_FACTOR = 1.25  # Switch Transformer's; token_drop keeps at most this times the mean rows per expert
HELD_OUT_SHARE = 1 / 16
COUNTED_STEPS = 20  # the last steps of training, in which rows per expert are counted


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model and how it is trained.

    tile: the rounding's tile in the main table, in rows. held_out_windows: at most so many windows are evaluated.
    """

    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    experts: int
    top_k: int
    expert_size: int
    batch: int
    length: int
    steps: int
    learning_rate: float
    tile: int
    held_out_windows: int
    initializer_range: float = 0.02
    balancing_coefficient: float = 0.01

    @property
    def tokens(self) -> int:
        """T: tokens of a training batch."""
        return self.batch * self.length

    @property
    def mean_rows(self) -> int:
        """T * K / E: rows per expert on average."""
        return self.tokens * self.top_k // self.experts


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(name="cpu", vocab_size=2048, hidden_size=128, layers=4, heads=4, experts=32, top_k=4, expert_size=64,
               batch=16, length=128, steps=300, learning_rate=2e-3, tile=64, held_out_windows=512,
               initializer_range=0.05),
        Preset(name="gpu", vocab_size=4096, hidden_size=384, layers=4, heads=6, experts=128, top_k=4, expert_size=160,
               batch=32, length=512, steps=450, learning_rate=1.5e-3, tile=128, held_out_windows=4096),
    )
}  # fmt: skip


class Run(NamedTuple):
    """One row of the table: the method, its tile in rows (0 where the method has none), the balancing loss, the seed.

    balancing: "layer", Switch Transformer's loss of every layer and the mean of these; or "pooled", Transformers' own,
        which adds up the layers' loads first and so asks for balance over the whole model, not in each layer.
    """

    method: str
    tile: int
    balancing: str
    seed: int


class Corpus(NamedTuple):
    """Token ids of the training and of the held-out files, and how many bytes the latter's text has."""

    train: torch.Tensor
    held_out: torch.Tensor
    held_out_bytes: int
    description: str


def read_corpus(preset: Preset, folder: Path | None = None) -> Corpus:
    """Every .py file below `folder` (default: this Python's standard library, without installed packages), tokenised.

    A hash of a file's path decides whether it is held out; the tokenizer, a byte-level BPE, is trained on the others.

    Raises:
        FileNotFoundError: too little text there for a batch and a held-out file.
    """
    source = f"Python {platform.python_version()}'s standard library" if folder is None else folder.name
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    texts = {True: [], False: []}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if "site-packages" in name or "dist-packages" in name:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
        texts[number < HELD_OUT_SHARE] += [text] if text.strip() else []
    if not texts[True] or sum(map(len, texts[False])) < preset.tokens:
        raise FileNotFoundError(
            f"{folder} holds too few Python sources to train on: use a Python that ships its standard library's "
            "sources, or name a folder with --corpus"
        )
    tokenizer = train_tokenizer(texts[False], preset.vocab_size)

    def stream(texts):
        encoded = tokenizer.backend_tokenizer.encode_batch(texts)
        return torch.tensor([id for one in encoded for id in (*one.ids, tokenizer.eos_token_id)], dtype=torch.int32)

    size = {held_out: sum(len(text.encode()) for text in texts[held_out]) for held_out in texts}
    description = f"{source}: {size[False] / 1e6:.1f} MB to train on, {size[True] / 1e6:.2f} MB held out"
    return Corpus(stream(texts[False]), stream(texts[True]), size[True], description)


class CapacityRouting:
    """Forward hook of a Qwen3-MoE router, for training: every expert takes its best tokens, C at the most.

    Expert choice lets it take them from all tokens (C = T*K/E: every expert gets as many rows). Token drop, the classic
    capacity factor, from those whose top-k names it. Weights are Qwen3's: scores, divided by their sum over the experts
    that the token has in the end (none: zeros).
    """

    def __init__(self, capacity_factor: float, only_top_k: bool):
        self.capacity_factor = capacity_factor
        self.only_top_k = only_top_k

    def __call__(self, router, args, output):
        if not router.training:
            return None
        logits_TE, _, index_TK = output
        num_tokens, num_experts = logits_TE.shape
        capacity = min(int(self.capacity_factor * index_TK.numel() / num_experts), num_tokens)
        scores_TE = logits_TE.softmax(-1, dtype=torch.float32)
        with torch.no_grad():
            eligible_TE = torch.ones_like(scores_TE, dtype=torch.bool)
            if self.only_top_k:
                eligible_TE = torch.zeros_like(eligible_TE).scatter_(1, index_TK, True)
            token_CE = scores_TE.masked_fill(~eligible_TE, float("-inf")).topk(capacity, dim=0).indices
            taken_CE = eligible_TE.gather(0, token_CE)
            mask_TE = torch.zeros_like(eligible_TE).scatter_(0, token_CE, taken_CE)
            expert_CE = torch.arange(num_experts, device=logits_TE.device).expand_as(token_CE)
        chosen_TE = torch.where(mask_TE, scores_TE, 0.0)
        total_T1 = chosen_TE.sum(-1, keepdim=True)
        weights_TE = (chosen_TE / torch.where(total_T1 > 0, total_T1, 1.0)).to(logits_TE.dtype)
        weight_CE = weights_TE.gather(0, token_CE)
        expert_EC = torch.where(taken_CE, expert_CE, num_experts).T  # the sentinel: a place that nobody took
        rows = (part.reshape(-1) for part in (expert_EC, weight_CE.T, token_CE.T))
        routing = Routing(*rows, sentinels=True)
        return logits_TE, routing.weights, routing


class RowCounter:
    """Forward pre-hook of an experts module: notes the rows of every expert, one [E] tensor a call, while `on`."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.on = False
        self.calls: list[torch.Tensor] = []

    def __call__(self, experts, args):
        if self.on:
            index_P = (args[1].expert_index if isinstance(args[1], Routing) else args[1]).reshape(-1).long()
            rows_E = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=index_P.device)  # + 1: the sentinel
            self.calls.append(rows_E.scatter_add_(0, index_P, torch.ones_like(index_P))[:-1])


def count_rows(counters: list[RowCounter], on: bool) -> torch.Tensor | None:
    """Switch counting; when it ends, the rows of every expert: [layers, calls, E], on the CPU."""
    counted = None if on else torch.stack([torch.stack(counter.calls) for counter in counters]).cpu()
    for counter in counters:
        counter.on, counter.calls = on, []
    return counted


def build_model(preset: Preset, run: Run, device: torch.device):
    """The model at its random start, patched for the run's method: (model, row counters, one a layer)."""
    torch.manual_seed(run.seed)
    config = Qwen3MoeConfig(
        vocab_size=preset.vocab_size,
        hidden_size=preset.hidden_size,
        moe_intermediate_size=preset.expert_size,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.heads,
        head_dim=preset.hidden_size // preset.heads,
        num_experts=preset.experts,
        num_experts_per_tok=preset.top_k,
        norm_topk_prob=True,
        output_router_logits=True,  # needed for the load-balancing loss, which Transformers adds to the loss
        router_aux_loss_coef=preset.balancing_coefficient if run.balancing == "pooled" else 0.0,
        initializer_range=preset.initializer_range,
        max_position_embeddings=preset.length,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, experts_implementation="sonicmoe_hf")
    rounds = run.method in ROUNDINGS
    # min_tiles_per_expert=0: the sweep goes below the two tiles at which rounding would give way to top-k
    policy = TokenRounding(rounding=run.method, tile=run.tile, min_tiles_per_expert=0) if rounds else None
    sonicmoe_hf.patch_model(model, routing=policy)
    counters = []
    for layer in find_layers(model):
        if run.method == "expert_choice":
            layer.router.register_forward_hook(CapacityRouting(1.0, only_top_k=False))
        elif run.method == "token_drop":
            layer.router.register_forward_hook(CapacityRouting(DROP_CAPACITY_FACTOR, only_top_k=True))
        counters.append(RowCounter(preset.experts))
        layer.experts.register_forward_pre_hook(counters[-1])
    torch.manual_seed(run.seed)  # stochastic rounding draws from here
    return model, counters


def make_optimizer(model, preset: Preset, device: torch.device):
    """AdamW (matrices decay), with a linear warm-up over a tenth of the steps and a cosine down to a tenth."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=preset.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    warmup = max(preset.steps // 10, 1)

    def factor(step):
        done = (step - warmup) / max(preset.steps - warmup, 1)
        return (step + 1) / warmup if step < warmup else 0.55 + 0.45 * math.cos(math.pi * done)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def batches(tokens: torch.Tensor, preset: Preset, seed: int):
    """`preset.steps` batches [batch, length] of windows at random places, the same for every method of a seed."""
    generator = torch.Generator().manual_seed(seed)
    last = len(tokens) - preset.length
    start = torch.randint(0, last + 1, (preset.steps, preset.batch, 1), generator=generator).to(tokens.device)
    inside = torch.arange(preset.length, device=tokens.device)
    for step in range(preset.steps):
        yield tokens[start[step] + inside].long()


def autocast(device: torch.device):
    """bf16 autocast over fp32 weights on a GPU; plain fp32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def losses(model, preset: Preset, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(what is minimised, cross-entropy alone) of a batch: they differ by the balancing loss, pooled or by layer."""
    with autocast(ids.device):
        out = model(input_ids=ids, labels=ids, use_cache=False)
    if model.router_aux_loss_coef:
        return out.loss, (out.loss - preset.balancing_coefficient * out.aux_loss).detach()
    each = [load_balancing_loss_func((logits,), preset.experts, preset.top_k) for logits in out.router_logits]
    return out.loss + preset.balancing_coefficient * torch.stack(each).mean(), out.loss.detach()


def train(model, counters, preset: Preset, tokens: torch.Tensor, seed: int):
    """Train: (cross-entropy of every step [steps], rows per expert in the last steps [layers, steps, E])."""
    optimizer, schedule = make_optimizer(model, preset, tokens.device)
    model.train()
    cross_entropies = []
    counted_from = max(preset.steps - COUNTED_STEPS, 0)
    for step, ids in enumerate(batches(tokens, preset, seed)):
        if step == counted_from:
            count_rows(counters, on=True)
        loss, cross_entropy = losses(model, preset, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        cross_entropies.append(cross_entropy)
    return torch.stack(cross_entropies).cpu(), count_rows(counters, on=False)


@torch.no_grad()
def evaluate(model, counters, preset: Preset, tokens: torch.Tensor):
    """Mean loss in nats per token over the held-out files, and top-k's rows per expert there [layers, E].

    Where there are too many windows, an even selection of them.

    Raises:
        RuntimeError: the model did not route every token to K experts, so this was not top-k.
    """
    model.eval()
    windows = tokens[: len(tokens) // preset.length * preset.length].view(-1, preset.length).long()
    windows = windows[:: -(-len(windows) // preset.held_out_windows)]
    count_rows(counters, on=True)
    total = 0.0
    for ids in windows.split(preset.batch):
        with autocast(tokens.device):
            out = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=False)
        total = total + out.loss.double() * len(ids)
    rows = count_rows(counters, on=False)
    per_layer = rows.sum(dim=(1, 2))
    if not (per_layer == windows.numel() * preset.top_k).all():
        raise RuntimeError(f"evaluation routed {per_layer.tolist()} rows per layer, not {preset.top_k} a token")
    return float(total) / len(windows), rows.sum(1)


def measure(preset: Preset, run: Run, corpus: Corpus, device: torch.device) -> dict:
    """Train and evaluate one run: the figures of its row in the CSV."""
    began = time.perf_counter()
    model, counters = build_model(preset, run, device)
    cross_entropies, trained_rows = train(model, counters, preset, corpus.train.to(device), run.seed)
    seconds = time.perf_counter() - began
    loss, held_out_rows = evaluate(model, counters, preset, corpus.held_out.to(device))
    tokens_per_byte = len(corpus.held_out) / corpus.held_out_bytes
    spread = held_out_rows.double().std(1, correction=0) / held_out_rows.double().mean(1)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_loss": cross_entropies[0].item(),
        "train_loss": cross_entropies[-2 * COUNTED_STEPS :].mean().item(),
        "valid_loss": loss,
        "valid_perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2) * tokens_per_byte,
        "rows_ratio": trained_rows.double().mean().item() / preset.mean_rows,
        "starved_share": (trained_rows == 0).double().mean().item(),
        "dead_share": (trained_rows.sum(1) == 0).double().mean().item(),
        "dead_share_held_out": (held_out_rows == 0).double().mean().item(),
        "load_cv_held_out": spread.mean().item(),
        "seconds": seconds,
    }
