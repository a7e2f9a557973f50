"""One run of token_rounding_quality.py and load_balance.py: a small Qwen3-MoE model from scratch, by one routing method.

Within a seed every method starts from the same weights and sees the same batches in the same order; the model is patched
as a user would patch it, and evaluated, always with top-k, on files that training never saw.

Letters: T tokens of a batch, E experts, K experts per token, C an expert's capacity in rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import sonicmoe_hf
from benchmarks.quality.counting import RowCounter, attach_counter
from benchmarks.quality.quality_corpus import VOCAB_SIZE, Corpus
from sonicmoe_hf.layer.config import ROUNDINGS, TokenRounding
from sonicmoe_hf.layer.routing import Routing
from sonicmoe_hf.patching.moe_layers import find_layers

After = Callable[[], None] | None

METHODS = ("top_k", *ROUNDINGS, "token_drop", "expert_choice")
DROP_CAPACITY_FACTOR = 1.25  # Switch Transformer's; token_drop keeps at most this times the mean rows per expert
COUNTED_STEPS = 20  # the last steps of training, in which rows per expert are counted
DISTURBANCE = 1e-4  # of a replica's initial weights, relative; far below what the choice of a seed changes
EAGER_STEPS = 3  # before the CUDA graph: kernels are compiled, the optimiser's state is made

# Transformers makes a mask while a CUDA graph is captured, and attention with a mask is slow; other names get none
AttentionInterface.register("causal_sdpa", sdpa_attention_forward)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model and how it is trained.

    tile: the rounding's tile in the main table, in rows. held_out_windows: at most so many windows are evaluated.
    final_rate: the learning rate at the end, as a share of the peak.
    """

    name: str
    vocab_size: int = VOCAB_SIZE
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
    warmup: float = 0.1
    final_rate: float = 0.0

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
        Preset(name="cpu", hidden_size=128, layers=4, heads=4, experts=32, top_k=4, expert_size=64,
               batch=16, length=128, steps=300, learning_rate=2e-3, tile=64, held_out_windows=512,
               initializer_range=0.05),
        Preset(name="gpu", hidden_size=256, layers=4, heads=4, experts=64, top_k=4, expert_size=128,
               batch=16, length=512, steps=1300, learning_rate=2e-3, tile=128, held_out_windows=2048),
    )
}  # fmt: skip


class TrainingRun(NamedTuple):
    """One row of the table: the method, its tile in rows (0 where the method has none), the balancing loss, the seed.

    balancing: "layer", LoadBalancing's loss of every layer, or "none". replica: 0, or a number; a replica differs from
        run 0 by 1e-4 of every initial weight, so that the two show how far apart equal methods end.
    """

    method: str
    tile: int
    balancing: str
    seed: int
    replica: int = 0


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
        logits_TE, top_k_weights_TK, index_TK = output
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
        # the balancing loss follows the weights of the router's own hook: keep them in the graph, with gradient zero
        weight_CE = weights_TE.gather(0, token_CE) + 0.0 * top_k_weights_TK.sum()
        expert_EC = torch.where(taken_CE, expert_CE, num_experts).T  # the sentinel: a place that nobody took
        rows = (part.reshape(-1) for part in (expert_EC, weight_CE.T, token_CE.T))
        routing = Routing(*rows, sentinels=True)
        return logits_TE, routing.weights, routing


def sizes_of(preset: Preset) -> dict:
    """Make the entries that the configs of all models here have in common."""
    return {
        "vocab_size": preset.vocab_size,
        "hidden_size": preset.hidden_size,
        "num_hidden_layers": preset.layers,
        "moe_intermediate_size": preset.expert_size,
        "num_experts_per_tok": preset.top_k,
        "norm_topk_prob": True,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.heads,
        "head_dim": preset.hidden_size // preset.heads,
        "initializer_range": preset.initializer_range,
        "max_position_embeddings": preset.length,
        "tie_word_embeddings": True,
    }


def qwen3_config(preset: Preset, **changes) -> Qwen3MoeConfig:
    """Make the model's config."""
    return Qwen3MoeConfig(**sizes_of(preset), num_experts=preset.experts, **changes)


def random_model(config, seed: int, device: torch.device):
    """Build the model, randomly initialised, with our experts."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, experts_implementation="sonicmoe_hf", attn_implementation="causal_sdpa"
        )


def build_model(preset: Preset, run: TrainingRun, device: torch.device):
    """Build the model, randomly initialised, patched for the run's method: (model, counter of rows)."""
    model = random_model(qwen3_config(preset), run.seed, device)
    if run.replica:
        generator = torch.Generator().manual_seed(1000 * run.seed + run.replica)
        for parameter in model.parameters():
            change = 1 + DISTURBANCE * torch.randn(parameter.shape, generator=generator)
            parameter.data.mul_(change.to(device))
    rounds = run.method in ROUNDINGS
    # min_tiles_per_expert=0: the sweep goes below the tiles at which rounding gives way to top-k
    policy = TokenRounding(rounding=run.method, tile=run.tile, min_tiles_per_expert=0) if rounds else None
    sonicmoe_hf.patch_model(model, routing=policy)
    if run.balancing == "layer":
        sonicmoe_hf.LoadBalancing(per_layer_loss=preset.balancing_coefficient).start(model)
    for layer in find_layers(model):
        if run.method == "expert_choice":
            layer.router.register_forward_hook(CapacityRouting(1.0, only_top_k=False))
        elif run.method == "token_drop":
            layer.router.register_forward_hook(CapacityRouting(DROP_CAPACITY_FACTOR, only_top_k=True))
    counter = attach_counter(model, preset.experts, device)
    torch.manual_seed(run.seed)  # stochastic rounding draws from here
    return model, counter


def make_optimizer(model, preset: Preset, device: torch.device) -> torch.optim.Optimizer:
    """Make AdamW; matrices decay. On a GPU the learning rate is a tensor, so that a CUDA graph can follow a
    schedule."""
    on_gpu = device.type == "cuda"
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    rate = torch.tensor(preset.learning_rate, device=device) if on_gpu else preset.learning_rate
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu)


def set_rate(optimizer: torch.optim.Optimizer, preset: Preset, step: int) -> None:
    """Set the step's learning rate: a linear warm-up over the first steps, then a cosine down to the final rate."""
    warmup = max(int(preset.warmup * preset.steps), 1)
    done = (step - warmup) / max(preset.steps - warmup, 1)
    cosine = preset.final_rate + (1 - preset.final_rate) * (1 + math.cos(math.pi * done)) / 2
    rate = preset.learning_rate * ((step + 1) / warmup if step < warmup else cosine)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def batches(tokens: torch.Tensor, preset: Preset, seed: int) -> Callable[[int], torch.Tensor]:
    """Draw the batches [batch, length] of steps, by step, the same for every method of a seed: the text's windows in
    random order.

    No window comes twice before all have come once.
    """
    windows = tokens[: len(tokens) // preset.length * preset.length].view(-1, preset.length)
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-preset.steps * preset.batch // len(windows))
    order = torch.cat([torch.randperm(len(windows), generator=generator) for _ in range(epochs)]).to(tokens.device)
    return lambda step: windows[order[step * preset.batch : (step + 1) * preset.batch]].long()


def autocast(device: torch.device):
    """Make the context that computes in bf16 by autocast on a GPU, and in plain fp32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


class OptimizerStep:
    """An optimiser step on the batch in `ids`, and `after` it; its loss is in `loss` afterwards.

    `capture` records it as a CUDA graph, which later calls replay: small models wait for the host otherwise.
    """

    def __init__(self, model, optimizer: torch.optim.Optimizer, preset: Preset, device: torch.device, after: After):
        self.model, self.optimizer, self.after = model, optimizer, after
        self.ids = torch.zeros(preset.batch, preset.length, dtype=torch.int64, device=device)
        self.loss = torch.zeros((), device=device)
        self.graph = None

    def __call__(self) -> None:
        if self.graph is None:
            self.optimizer.zero_grad(set_to_none=True)
            self._run()
        else:
            self.graph.replay()

    def capture(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # the graph's gradients live in its own memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self._run()
        self.graph = graph

    def _run(self) -> None:
        with autocast(self.ids.device):
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.after is not None:
            self.after()
        self.loss.copy_(loss.detach())


def train(
    model, counter: RowCounter, preset: Preset, tokens: torch.Tensor, seed: int, graph: bool, after: After = None
) -> torch.Tensor:
    """Train: the loss of every step [steps]. The counter counts the last steps' rows."""
    stream = None
    if tokens.is_cuda:
        stream = torch.cuda.Stream()  # on which a graph is captured
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer = make_optimizer(model, preset, tokens.device)
        model.train()
        one_step = OptimizerStep(model, optimizer, preset, tokens.device, after)
        cross_entropies = torch.zeros(preset.steps, device=tokens.device)
        batch_of = batches(tokens, preset, seed)
        for step in range(preset.steps):
            if graph and step == EAGER_STEPS:
                one_step.capture()
            if step == max(preset.steps - COUNTED_STEPS, 0):
                counter.reset()
            set_rate(optimizer, preset, step)
            one_step.ids.copy_(batch_of(step))
            one_step()
            cross_entropies[step] = one_step.loss
        return cross_entropies.cpu()


@torch.no_grad()
def evaluate(model, counter: RowCounter, preset: Preset, tokens: torch.Tensor):
    """Compute mean loss in nats per token over the held-out files, and top-k's rows per expert there [layers, E].

    Where there are too many windows, an even selection of them.

    Raises:
        RuntimeError: the model did not route every token to K experts, so this was not top-k.
    """
    model.eval()
    windows = tokens[: len(tokens) // preset.length * preset.length].view(-1, preset.length).long()
    windows = windows[:: -(-len(windows) // preset.held_out_windows)]
    counter.reset()
    total = 0.0
    for ids in windows.split(4 * preset.batch):
        with autocast(tokens.device):
            out = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=False)
        total = total + out.loss.double() * len(ids)
    rows, *_ = counter.read_counts()
    per_layer = rows.sum(1)
    if not (per_layer == windows.numel() * preset.top_k).all():
        raise RuntimeError(f"evaluation routed {per_layer.tolist()} rows per layer, not {preset.top_k} a token")
    return float(total) / len(windows), rows


def measure(preset: Preset, run: TrainingRun, corpus: Corpus, device: torch.device, graph: bool) -> dict:
    """Train and evaluate one run: the figures of its row in the CSV. graph: train by CUDA graph."""
    began = time.perf_counter()
    model, counter = build_model(preset, run, device)
    cross_entropies = train(model, counter, preset, corpus.train.to(device), run.seed, graph)
    trained = time.perf_counter() - began
    rows, starved, _ = counter.read_counts()
    steps = min(COUNTED_STEPS, preset.steps)
    loss, held_out_rows = evaluate(model, counter, preset, corpus.held_out.to(device))
    tokens_per_byte = len(corpus.held_out) / corpus.held_out_bytes
    spread = held_out_rows.double().std(1, correction=0) / held_out_rows.double().mean(1)
    last = {percent: max(preset.steps * percent // 100, 1) for percent in (25, 50, 75, 100)}
    width = max(preset.steps // 20, 1)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_loss": cross_entropies[0].item(),
        **{f"train_loss_{percent}": cross_entropies[:end][-width:].mean().item() for percent, end in last.items()},
        "held_out_loss": loss,
        "held_out_perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2) * tokens_per_byte,
        "rows_ratio": rows.double().mean().item() / steps / preset.mean_rows,
        "starved_share": starved.double().mean().item() / steps,
        "dead_share": (rows == 0).double().mean().item(),
        "dead_share_held_out": (held_out_rows == 0).double().mean().item(),
        "load_cv_held_out": spread.mean().item(),
        "training_seconds": trained,
    }
