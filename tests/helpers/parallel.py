"""Models on several ranks: how they are loaded, their gradients, and what data parallelism should give."""

from dataclasses import fields

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from helpers.models import assert_all_close, batch, loss_and_gradients
from helpers.ranks import WORLD
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

OWN_BATCH = [{"padding": True, "seed": 1}, {"seed": 2}]  # of each rank
SUMMATION = "fp32: gradients of two ranks are added in another order"
PARTIAL_SUMS = "fp32: partial sums of the ranks are added in another order"
OPTIONS = {field.name for field in fields(DistributedConfig)}
HAS_EP_SIZE = "ep_size" in OPTIONS  # 5.17: enable_expert_parallel
HAS_PP_SIZE = "pp_size" in OPTIONS


def gather(gradient):
    """Gather the whole of a tensor that may be sharded."""
    if not hasattr(gradient, "full_tensor"):
        return gradient.detach()
    (placement, *others) = gradient.placements
    if isinstance(placement, _StridedShard) and not others:  # torch 2.11's full_tensor does not take it
        parts = [torch.empty_like(gradient.to_local()) for _ in range(gradient.device_mesh.size())]
        torch.distributed.all_gather(parts, gradient.to_local().contiguous(), gradient.device_mesh.get_group())
        pieces = zip(*(part.chunk(placement.split_factor, placement.dim) for part in parts))
        return torch.cat([torch.cat(piece, placement.dim) for piece in pieces], placement.dim)
    return gradient.full_tensor()


def train_and_evaluate(model, inputs):
    """Compute `loss_and_gradients`, and "inference": the logits in evaluation; whole tensors."""
    results = loss_and_gradients(model, inputs)
    with torch.no_grad():
        results["inference"] = model.eval()(**inputs).logits
    return {name: gather(tensor) for name, tensor in results.items()}


def whole_gradients(model):
    """Gather every gradient that there is, by its parameter's name, in fp32."""
    local = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: gather(gradient).float() for name, gradient in local.items() if gradient is not None}


def mean_of_ranks(model, batches=OWN_BATCH):
    """Compute the mean of each rank's loss and gradients one by one, which data parallelism should give."""
    results = [loss_and_gradients(model, batch(**own)) for own in batches]
    losses = [result.pop("loss") for result in results]
    for result in results:
        del result["logits"]
    return losses, {name: sum(result[name].float() for result in results) / len(batches) for name in results[0]}


def assert_mean_of_ranks(model, results):
    """Check that each rank's (loss, gradients) are the loss of its own batch and the mean gradients, of `model`
    unsharded."""
    losses, expected = mean_of_ranks(model)
    for own_loss, (loss, actual) in zip(losses, results, strict=True):
        assert_all_close({"loss": loss, **actual}, {"loss": own_loss, **expected}, 1e-5, SUMMATION)


def pretend_to_have_gpus():
    """Make accelerate take ranks for accelerators, on which alone it offers FSDP; it does so with CPU tensors."""
    state = PartialState(cpu=True)
    state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")


PARALLELISM = {  # entries of a DistributedConfig, of which not every version of Transformers has all
    "expert": {"tp_size": WORLD, **({"ep_size": WORLD} if HAS_EP_SIZE else {"enable_expert_parallel": True})},
    "tensor": {"tp_size": WORLD, "tp_plan": "auto"},
    "data": {"fsdp_size": WORLD},
    "both": {"ep_size": WORLD, "fsdp_size": WORLD},
    "pipeline": {"pp_size": WORLD},
    "ours": {"tp_size": WORLD, "ep_size": WORLD, "ep_implementation": "sonicmoe_hf"},
}


def parallel_config(kind):
    return DistributedConfig(**PARALLELISM[kind])


def load_parallel(folder, kind, **options):
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=parallel_config(kind), **options).train()
