"""Model FLOP/s of measured training steps: adds the metric `tflops` beside each `tokens_per_s` of a CSV.

    python -m benchmarks.step.flops benchmarks/results/train_step_four.csv benchmarks/results/long.csv

Needs no GPU. The FLOPs of a token are those that a step needs, each counted once, whatever is computed again: two for
each weight that a token meets (the experts of its top-K alone) forwards, two for the gradient of its input, and two for
the weight's own where it is trained; in attention, two for each value of a query and a key or value that the causal
mask lets meet, forwards, and twice that backwards. Adapters count as trained weights. Divided by the card's peak (989e12
dense bf16 FLOP/s of an H100 SXM or an H200) it is the model FLOPs utilization (MFU), as others publish it.
"""

from __future__ import annotations

import argparse
import csv
import re
from functools import cache
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.common.table import read_rows
from benchmarks.step import long, models
from benchmarks.step.training import ATTENTION, RANK, SEQUENCE
from sonicmoe_hf.patching.moe_layers import find_layers

TOKENS = ("tokens_per_s", "tokens_per_second")
METRIC = "tflops"


def count_weights(model: nn.Module) -> int:
    """Count the weights that a token is multiplied with: linear layers', routers' and those of its top-K experts."""
    layers = list(find_layers(model))
    experts = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = id(model.get_output_embeddings().weight)
    dense = sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.dim() > 1
        and id(parameter) not in experts
        and (id(parameter) not in embeddings or id(parameter) == head)
    )
    config = model.config.get_text_config()
    return dense + sum(
        parameter.numel() // layer.experts.num_experts * config.num_experts_per_tok
        for layer in layers
        for parameter in layer.experts.parameters()
        if parameter.dim() > 2
    )


def attention_flops(config, sequence: int) -> int:
    """Count the FLOPs of attention's two products for one token forwards: on average it meets half of the sequence, or
    its window where the layer has one."""
    heads, head = (
        config.num_attention_heads,
        getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
    )
    query = getattr(config, "qk_nope_head_dim", None)
    sizes = head * 2 if query is None else query + config.qk_rope_head_dim + config.v_head_dim
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or sequence
    met = {"full_attention": sequence / 2, "sliding_attention": min(window, sequence / 2)}
    if unknown := set(kinds) - met.keys():
        raise ValueError(f"the FLOPs of {', '.join(sorted(unknown))} are not counted: name other rows by --config")
    return round(sum(2 * heads * sizes * met[kind] for kind in kinds))


def adapter_weights(model: nn.Module, rank: int, whole_attention: bool) -> int:
    """Count the weights of adapters that a token is multiplied with: rank times the inputs and outputs of attention's
    linear layers, and of each of its top-K experts' two projections."""
    config = model.config.get_text_config()
    linear = sum(
        rank * sum(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and ".self_attn." in name
        and (whole_attention or name.rsplit(".", 1)[-1] in ATTENTION)
    )
    return linear + sum(
        rank * config.num_experts_per_tok * sum(parameter.shape[1:])
        for layer in find_layers(model)
        for parameter in layer.experts.parameters()
        if parameter.dim() > 2
    )


@cache
def flops_of_token(
    name: str, layers: int, sequence: int, mode: str, rank: int = RANK, whole_attention: bool = False
) -> float:
    """Compute the FLOPs of one token in a training step of one of benchmarks.step.models' models.

    Args:
        mode: "full", or "LoRA" and "QLoRA": adapters of `rank` on the experts and on the query's and value's projections.
        whole_attention: adapters on all linear layers of attention.
    """
    config = models.config_of(name, layers, tiny=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    met, attention = count_weights(model), attention_flops(config, sequence)
    if mode == "full":
        return 6 * met + 3 * attention
    return 4 * met + 6 * adapter_weights(model, rank, whole_attention) + 3 * attention


def add_flops(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Put a row of the metric `tflops` behind each row of tokens a second of a GPU, in place of such rows that there
    are."""
    with_flops = []
    for row in rows:
        if row["metric"] == METRIC:
            continue
        with_flops.append(row)
        mode = row["mode"].split(",")[0]
        if row["metric"] not in TOKENS or mode not in ("full", "LoRA", "QLoRA") or row["config"] not in models.MODELS:
            continue
        layers, tokens = map(int, row["shape"].split(","))
        if is_one_sequence := row["metric"] == "tokens_per_second":  # of benchmarks.step.long
            sequence, rank = tokens, long.RANK
        else:
            sequence, named = min(tokens, SEQUENCE), re.search(r"\br = (\d+)", row["launch"])
            rank = int(named[1]) if named else RANK
        whole = is_one_sequence or "whole attention" in row["launch"]
        flops = flops_of_token(row["config"], layers, sequence, mode, rank, whole)
        figures = {name: f"{1e-12 * flops * float(row[name]):.6g}" for name in ("median", "p20", "p80")}
        with_flops.append(row | {"metric": METRIC} | figures)
    return with_flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="+")
    for path in parser.parse_args().csv:
        rows = add_flops(read_rows(path))
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
