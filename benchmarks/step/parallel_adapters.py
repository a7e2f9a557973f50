"""Adapters over packed experts under expert parallelism, compared with one GPU: losses and every adapter's gradient.

    torchrun --nproc-per-node 4 -m benchmarks.step.parallel_adapters [--experts nf4 bf16] [--layers 4]

A cut Qwen3-30B-A3B with random weights is saved, and loaded twice: whole by the first rank, and by all ranks with their
own experts and everything else sharded by FSDP2. Both have the same adapters on experts and attention. Each rank has a
batch of its own; one GPU takes them one by one. Rows: relative errors of the losses, and of the adapters' gradients.
`--device cpu --tiny --tokens 64` checks the script.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from peft import get_peft_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Table
from benchmarks.step.models import config_of, spread_load
from benchmarks.step.run import join_ranks
from benchmarks.step.training import WHOLE_ATTENTION, sequences
from sonicmoe_hf.lora.shares import _sharded_factors, whole_factor
from sonicmoe_hf.tools.comparing import relative_error

MODEL, RANK = "Qwen3-30B-A3B", 8


def save(folder: str, options) -> None:
    """Save a model whose pre-activations are O(1): at an initialisation of 0.02 experts hardly count."""
    config = config_of(MODEL, options.layers, options.tiny)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def load(folder: str, experts: str, options, distributed: DistributedConfig | None = None):
    """Load the model and give it adapters, the same on one GPU and on several."""
    packed = {} if experts == "bf16" else {"experts_quantization": experts}
    location = {"distributed_config": distributed} if distributed else {"device_map": options.device}
    model = sonicmoe_hf.from_pretrained(folder, dtype=torch.bfloat16, **packed, **location)
    spread_load(model)
    torch.manual_seed(0)
    adapters = sonicmoe_hf.lora_config(model, RANK, target_modules=list(WHOLE_ATTENTION), init_lora_weights=False)
    return get_peft_model(model, adapters).train()


def gradients_of(model, batches) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Compute the losses of the batches, and the whole gradients of their mean's adapters."""
    losses = []
    for tokens in batches:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        (loss / len(batches)).backward()
        losses.append(loss.detach().float())
    # torch 2.11's full_tensor does not take how the experts' factors are sharded
    shared = {name: (side, parallelism) for name, side, parallelism in _sharded_factors(model)}
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient: Any = parameter.grad
            if name in shared:
                gradient = whole_factor(gradient, *shared[name])
            elif hasattr(gradient, "full_tensor"):
                gradient = gradient.full_tensor()
            gradients[name] = gradient.float().cpu()
    return losses, gradients


def compare(folder: str, experts: str, options, rank: int, world: int) -> dict[str, float]:
    """Compute the largest relative errors, which the first rank knows."""
    whole = SimpleNamespace(losses=[], gradients={})
    vocabulary = config_of(MODEL, options.layers, options.tiny).vocab_size
    batches = [sequences(options.tokens, vocabulary, options.device, seed=each) for each in range(world)]
    if rank == 0:
        whole.losses, whole.gradients = gradients_of(load(folder, experts, options), batches)
    dist.barrier()
    sharing = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="sonicmoe_hf")
    (loss,), gradients = gradients_of(load(folder, experts, options, sharing), batches[rank : rank + 1])
    losses = [torch.empty_like(loss) for _ in range(world)]
    dist.all_gather(losses, loss)
    if rank:
        return {}
    errors = {name: relative_error(gradient, whole.gradients[name]) for name, gradient in gradients.items()}
    assert len(errors) == len(whole.gradients)
    metrics = {"error_loss": max(relative_error(*pair) for pair in zip(losses, whole.losses))}
    for kind, is_of in (("experts", True), ("attention", False)):
        of_kind = [error for name, error in errors.items() if (".experts." in name) == is_of]
        metrics |= {f"error_{kind}_max": max(of_kind), f"error_{kind}_median": torch.tensor(of_kind).median().item()}
    return metrics


def main() -> None:
    """Compare, and write the rows."""
    parser = Command(__doc__, "parallel_adapters.csv", "--tiny --tokens 64")
    parser.add_argument("--experts", nargs="+", default=("nf4", "bf16"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    options = parser.parse_args()
    rank, world = join_ranks(options.device)
    table = Table(options.csv, ("shape", "case", "metric"), {"median": lambda values: values[0]})
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    if rank == 0:
        save(folders[0], options)
    dist.barrier()
    for experts in options.experts:
        metrics = compare(folders[0], experts, options, rank, world)
        if rank == 0:
            shape = f"{options.layers} layers, {options.tokens} tokens a rank, {world} ranks"
            table.add(shape, f"LoRA, experts in {experts}", metrics)
            table.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
