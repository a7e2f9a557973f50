"""Training steps of Qwen3-30B-A3B's layers on several GPUs: expert parallelism of ours, Transformers' own, and FSDP2.

    torchrun --nproc-per-node 4 -m benchmarks.step.expert_parallel [--layers 4] [--tokens 16384] [--spread-load]
        [--case NAME ...] [--exchanges gathering,all_to_all] [--liger]

Every case trains the same random weights in bf16 on the same random tokens, in sequences of 4,096, with our experts. A
step is forward, backward, fused AdamW and zero_grad. The learning rate is 0, so that the routing stays as it is.

Losses and norms of the gradients of the top-k cases must agree. Steps are timed, and the bytes of one are counted: what a
GPU sends to others. That is N - 1 times its part for an all-gather, (N - 1) / N of its input for a reduce-scatter, and
what is for others in an all-to-all. `exchange` is what the experts' ranks exchange, `other` what FSDP2 does. On GPUs a
trace of two steps says for how long NCCL's kernels ran (nccl_ms), others did (compute_ms), and any (busy_ms): what NCCL
hides behind others is the sum of the first two less the third.

--exchanges measures these exchanges of tokens, in place of the one that sonicmoe-hf chooses, beside the others' top-k.
Set NCCL_NVLS_ENABLE=0 where NVLink multicast is not to be used. `--device cpu --tiny --tokens 64` checks the script.
"""

from __future__ import annotations

import collections
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.distributed import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import RANGE, Table
from benchmarks.common.timing import release, union_length, waited_times
from benchmarks.step.models import add_settings, apply_settings, config_of, settings_of
from benchmarks.step.run import join_ranks
from benchmarks.step.training import GIB, one_step, sequences
from sonicmoe_hf.expert_parallel import collectives
from sonicmoe_hf.expert_parallel.exchange import EXCHANGES, use_exchange
from sonicmoe_hf.tools.random_models import random_packed_model

MODEL = "Qwen3-30B-A3B"
INPUTS = ("input", "input_tensor", "inputs", "tensors", "input_tensors")  # arguments of the ops of collectives
WARMUP = 3
TOLERANCES = {"loss": 2e-3, "gradient_norm": 2e-2}  # bf16: partial sums of experts and of ranks are rounded


class Case(NamedTuple):
    """A way to train on several GPUs.

    ep_implementation: brings experts their tokens; None: FSDP2 gathers the weights instead. exchange: of ours, None for
    the one that it chooses.
    """

    ep_implementation: str | None
    routing: str | None
    exchange: str | None = None


CASES = {
    "all_to_all of Transformers, top-k": Case("all_to_all", None),
    "sonicmoe_hf, top-k": Case("sonicmoe_hf", None),
    "sonicmoe_hf, nearest": Case("sonicmoe_hf", "token_rounding"),
    "FSDP2, top-k": Case(None, None),
    "FSDP2, nearest": Case(None, "token_rounding"),
}
BY_EXCHANGE = {f"sonicmoe_hf by {exchange}, top-k": Case("sonicmoe_hf", None, exchange) for exchange in EXCHANGES}
OTHERS = ("all_to_all of Transformers, top-k", "FSDP2, top-k")


class BytesSent(TorchDispatchMode):
    """Counts the bytes that collectives on this rank's device send to other ranks: by the implementations of expert
    parallelism (`exchange`: the all-to-alls, and what our module calls) and by others."""

    def __init__(self, device_type: str):
        super().__init__()
        self.device_type = device_type
        self.exchange, self.other, self.is_ours = 0.0, 0.0, False

    def as_ours(self, function):
        """Count the collectives of `function` as ours."""

        def call(*args, **options):
            self.is_ours = True
            try:
                return function(*args, **options)
            finally:
                self.is_ours = False

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.partition("::")[2], func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, func, args, kwargs) -> None:
        arguments = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
        tensors = [value for key, value in arguments.items() if key in INPUTS]
        if not tensors or not {"process_group", "group_name"} & set(arguments):
            return  # a barrier, or waiting
        inputs = tree_leaves(tensors)
        if inputs[0].device.type != self.device_type:
            return
        group = arguments.get("process_group")
        group = (
            dist.ProcessGroup.unbox(group) if group is not None else _resolve_process_group(arguments["group_name"])
        )
        size, num_bytes = group.size(), sum(tensor.numel() * tensor.itemsize for tensor in inputs)
        if "all_to_all" in name or "alltoall" in name:
            splits = arguments.get("input_split_sizes")
            splits = splits or [len(inputs[0]) // size] * size
            sent = num_bytes * (1 - splits[group.rank()] / max(sum(splits), 1))
        elif "reduce_scatter" in name:
            sent = num_bytes * (size - 1) / size
        elif "gather" in name:
            sent = num_bytes * (size - 1)
        elif "reduce" in name:
            sent = 2 * num_bytes * (size - 1) / size
        else:
            print(f"not counted: {name}")
            return
        if self.is_ours or "all_to_all" in name or "alltoall" in name:
            self.exchange += sent
        else:
            self.other += sent


def fill(model) -> None:
    """Fill a model with the same random weights, whatever the shards: every rank makes each whole and keeps its part."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator(parameter.device).manual_seed(number)
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        whole.fill_(1.0) if whole.dim() == 1 else whole.normal_(0, 0.02, generator=generator)
        parameter.data.to_local().copy_(DtensorShardOperation(parameter.data).shard_tensor(whole))


def build(ep_implementation: str | None, options):
    """Build the model, its experts split over the ranks or their weights sharded by FSDP2, as from_pretrained does."""
    world = dist.get_world_size()
    sizes = {"fsdp_size": world}
    if ep_implementation is not None:
        sizes |= {"ep_size": world, "ep_implementation": ep_implementation}
    chosen = {"dtype": torch.bfloat16, "attn_implementation": "sdpa", "experts_implementation": "sonicmoe_hf"}
    model = random_packed_model(options.config, None, distributed_config=DistributedConfig(**sizes), **chosen)
    fill(model)
    apply_settings(MODEL, model, options)
    sonicmoe_hf.patch_model(model)
    return model.train()


def optimizer_of(model):
    """Make AdamW of groups of parameters of one mesh each: torch takes lists of one mesh."""
    by_mesh = collections.defaultdict(list)
    for parameter in model.parameters():
        by_mesh[parameter.device_mesh].append(parameter)
    return torch.optim.AdamW([{"params": group} for group in by_mesh.values()], lr=0.0, fused=True)


def forward_and_backward(model, tokens) -> torch.Tensor:
    """Run forward and backward, and return the loss."""
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def gradient_norm(model) -> float:
    """Compute the norm of all ranks' shards: no parameter is on two of them."""
    local = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    total = torch.stack([shard.float().square().sum() for shard in local]).sum()
    return (mean_over_ranks(total) * dist.get_world_size()) ** 0.5


def bytes_of_step(model, tokens, options) -> dict[str, float]:
    """Count the bytes that one forward and backward send."""
    counting = BytesSent(options.device)
    sending = (collectives._begin_gather, collectives._begin_scatter_sum, collectives._all_to_all)
    ours = {function.__name__: counting.as_ours(function) for function in sending}
    with counting, mock.patch.multiple(collectives, **ours):
        forward_and_backward(model, tokens)
    model.zero_grad(set_to_none=True)
    return {"exchange_bytes": counting.exchange, "other_bytes": counting.other}


def device_times(step) -> dict[str, float]:
    """Count the milliseconds of a step in which NCCL's kernels run on the GPU, others, and any."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step(), step(), torch.cuda.synchronize()
    kernels = [event for event in trace.events() if event.device_type == DeviceType.CUDA]
    of_nccl = [event for event in kernels if "nccl" in event.name.lower()]
    chosen = {"nccl_ms": of_nccl, "compute_ms": [e for e in kernels if e not in of_nccl], "busy_ms": kernels}
    spans = {name: [(e.time_range.start, e.time_range.end) for e in events] for name, events in chosen.items()}
    return {name: union_length(each) / 2e3 for name, each in spans.items()}


def measure(model, case: Case, tokens, options) -> dict:
    """Measure a case: metric -> values."""
    sonicmoe_hf.set_routing(model, case.routing)
    metrics = {"loss": mean_over_ranks(forward_and_backward(model, tokens)), "gradient_norm": gradient_norm(model)}
    model.zero_grad(set_to_none=True)
    metrics |= bytes_of_step(model, tokens, options)
    optimizer = optimizer_of(model)
    step = lambda: one_step(model, optimizer, tokens, autocast=False)  # noqa: E731
    step()
    release()
    ms, _ = waited_times(step, options.steps, WARMUP - 1)
    peak = torch.cuda.max_memory_allocated() / GIB if options.device == "cuda" else float("nan")
    speeds = [1e3 * options.tokens / each for each in ms]
    if options.device == "cuda":
        metrics |= device_times(step)
    return metrics | {"ms": ms, "peak_GiB": peak, "tokens_per_second_per_gpu": speeds}


def results_of(options, table: Table, shape: str) -> dict[str, dict]:
    """Measure every case, each a row of the table; those of one implementation share a model."""
    tokens = sequences(options.tokens, options.config.vocab_size, options.device, seed=dist.get_rank())
    results = {}
    cases = {name: (CASES | BY_EXCHANGE)[name] for name in options.case or CASES}
    for implementation in dict.fromkeys(case.ep_implementation for case in cases.values()):
        model = build(implementation, options)
        for name, case in cases.items():
            if case.ep_implementation != implementation:
                continue
            with use_exchange(case.exchange):
                results[name] = measure(model, case, tokens, options)
            table.add(shape, name, results[name])
        del model
        release()
    return results


def check(results: dict[str, dict]) -> None:
    """Raise AssertionError where losses or gradients of the top-k cases differ."""
    top_k = {name: metrics for name, metrics in results.items() if (CASES | BY_EXCHANGE)[name].routing is None}
    first = next(iter(top_k.values()), None)
    for name, metrics in top_k.items():
        for metric, tolerance in TOLERANCES.items():
            error = abs(metrics[metric] / first[metric] - 1)
            assert error <= tolerance, f"{name}: {metric} {metrics[metric]} is {error:.1e} off {first[metric]}"


def main() -> None:
    parser = Command(__doc__, "expert_parallel.csv", "--tiny --tokens 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384, help="of each rank")
    parser.add_argument(
        "--vocabulary", type=int, help="default: the model's; a small one leaves the head out of the times"
    )
    add_settings(parser)
    parser.add_argument("--steps", type=int, default=10, help="timed, after the warm-up")
    parser.add_argument(
        "--case", action="append", choices=[*CASES, *BY_EXCHANGE], help="default: those that name no exchange"
    )
    parser.add_argument("--exchanges", help=f"of ours, in place of --case: some of {','.join(EXCHANGES)}")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    options = parser.parse_args()
    if options.exchanges:
        options.case = [*(f"sonicmoe_hf by {exchange}, top-k" for exchange in options.exchanges.split(",")), *OTHERS]
    sizes = {} if options.vocabulary is None else {"vocab_size": options.vocabulary}
    options.config = config_of(MODEL, options.layers, options.tiny, **sizes)
    rank, num_ranks = join_ranks(options.device)
    vocabulary, world = f"vocabulary {options.config.vocab_size}", f"{num_ranks} ranks"
    settings = settings_of(MODEL, options)
    shape = ", ".join([f"{options.layers} layers", vocabulary, f"{options.tokens} tokens a rank", world, *settings])
    table = Table(options.csv, ("shape", "case", "metric"), RANGE)
    results = results_of(options, table, shape)
    if rank == 0:
        table.write()
        check(results)
        print("losses and gradients of the top-k cases agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
