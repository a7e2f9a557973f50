"""Report of what is in force in a model that begins to train: layers, backend, routing, and which experts' weights are
trained. `attach` and `sonicmoe-hf run` print it at the first step."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel, TrainerCallback

from ..kernels.announce import is_first_rank
from ..layer import backends
from ..layer.packed_weight import PackedWeight
from ..models.patch import PatchReport
from ..patching.beside_bitsandbytes import dense_beside_bitsandbytes
from ..patching.moe_layers import every_experts, is_patched, transformers_model
from ..patching.support import supports
from ..private.torch import has_compiled_modules
from ..routing.hooks import routers
from ..routing.patched_model import find_state, routing_policy
from ..routing.support import with_rounding_reasons
from .mixed_precision import computing_dtype
from .router_loss import router_loss


class Remedies(NamedTuple):
    """Code or options that adapt experts which a LoRA leaves out, and that pack those which bitsandbytes leaves dense."""

    adapt: str
    pack: str


SPINNING = "OMP_WAIT_POLICY=PASSIVE, before Python starts: on busy cores threads that wait slow the others down much"
OF_A_SCRIPT = Remedies("sonicmoe_hf.lora_config(model)", 'experts_quantization="nf4"')


def _dtype(weight: torch.Tensor) -> torch.dtype:
    """Name the dtype that experts with this weight are computed in: its own, but for accelerate's mixed precision."""
    state: Any = sys.modules.get("accelerate.state")
    is_mixed = state is not None and state.is_initialized()
    return computing_dtype(weight.dtype, state.AcceleratorState().mixed_precision if is_mixed else "no")


class _Modules:
    """The modules of a model, listed once. named: by their names. experts: `every_experts`, in the model's order."""

    def __init__(self, model: nn.Module) -> None:
        self.named: dict[str, Any] = dict(model.named_modules())
        self.experts: dict[Any, None] = dict.fromkeys(every_experts(model))


def _expanded(modules: _Modules) -> str:
    """Say in how many layers packed experts lie expanded too."""
    layers = [
        [weight for weight in experts.parameters() if isinstance(weight, PackedWeight)] for experts in modules.experts
    ]
    count = sum(any(weight.expanded is not None for weight in weights) for weights in layers)
    return f" and in {count} of {len(layers)} layers expanded" if count else ""


def _lora_ranks(modules: _Modules) -> str:
    """Write the ranks of the experts' adapters, which PEFT may choose apart for each weight; "" without any."""
    of_weight: dict[str, set[int]] = {}
    for module in modules.named.values():
        if type(module).__name__ == "ParamWrapper" and module.get_base_layer() in modules.experts:
            of_weight.setdefault(module.parameter_name, set()).update(module.r.values())
    written = {name: " and ".join(map(str, sorted(ranks))) for name, ranks in of_weight.items()}
    if len(set(written.values())) < 2:
        return "".join(f"rank {ranks}" for ranks in set(written.values()))
    return " and ".join(f"rank {ranks} on {name}" for name, ranks in sorted(written.items()))


def _adapted_beside(modules: _Modules) -> list[str]:
    """Say which modules beside the experts have adapters, by the last part of their names."""
    adapted = {
        name.rpartition(".")[2]
        for name, module in modules.named.items()
        if len(getattr(module, "lora_A", ())) and module.get_base_layer() not in modules.experts
    }
    return [f"  LoRA beside the experts: on {', '.join(sorted(adapted))}"] if adapted else []


def _trained_weights(model: nn.Module, modules: _Modules, remedies: Remedies) -> str:
    """Say which of the experts' weights are trained, and what would change it."""
    ranks = _lora_ranks(modules)
    weights: list[Any] = [weight for experts in modules.experts for weight in experts.parameters()]
    formats = (weight.format for weight in weights if isinstance(weight, PackedWeight))
    packed = next(filter(None, formats), None)  # dense weights on the host have the format ""
    held = "frozen" if packed is None else f"frozen, packed as {packed}{_expanded(modules)}"
    dense = dense_beside_bitsandbytes(model)
    if dense is not None:
        held = f"frozen, in {dense} beside bitsandbytes' linear layers ({remedies.pack} packs them)"
    if ranks:
        return f"{held}, with LoRA of {ranks}"
    if any(weight.requires_grad for weight in weights):
        return "trained"
    has_lora = any(len(getattr(module, "lora_A", ())) for module in modules.named.values())
    return f"{held}, beside LoRA that leaves them out; {remedies.adapt} adapts them too" if has_lora else held


def _balanced_by(model: nn.Module, args: Any) -> list[str]:
    """Say what balances the experts, and whether the routers learn from it. args: of the Trainer, if it is known."""
    state, (coefficient, is_trainers) = find_state(model), router_loss(model, args)
    weight, updates_bias = (0.0, False) if state is None or state.balancing is None else state.balancing
    balancers = [f"a loss of weight {weight:g}"] * bool(weight) + ["the routers' correction biases"] * updates_bias
    if coefficient:
        balancers.append(
            f"a loss of {'the trainer' if is_trainers else 'the model'}'s own, router_aux_loss_coef={coefficient:g}"
        )
    if not balancers:
        return []
    weights = [weight for _, _, router in routers(model) for weight in router.parameters()]
    is_frozen = bool(weights) and not any(weight.requires_grad for weight in weights)
    frozen = "; the routers are frozen, so it reaches what they read" if is_frozen and (weight or coefficient) else ""
    return [f"  balancing: by {' and '.join(balancers)}{frozen}"]


def describe(model: PreTrainedModel, reason: str | None, trains: bool, remedies: Remedies, args: Any = None) -> str:
    """Write lines that say what was patched, what computes it and, once the program `trains`, what is trained; or why
    nothing was patched. args: of the Trainer that trains it, if one does."""
    name = type(model).__name__
    if reason is not None:
        return f"{name} is not patched: {reason}"
    report = PatchReport(with_rounding_reasons(supports(model), model), routing_policy(model))
    modules = _Modules(model)
    weight = next(weight for experts in modules.experts for weight in experts.parameters())
    dtype = _dtype(weight)
    choice = backends.choose(weight.device, dtype)
    compiled = ", layers compiled" if has_compiled_modules(list(modules.named.values())) else ""
    lines = [f"{name}: {report}", f"  backend: {choice.name} ({choice.reason}), in {dtype}{compiled}"]
    if weight.device.type == "cpu" and "OMP_WAIT_POLICY" not in os.environ:
        lines.append(f"  threads: {SPINNING}")
    if trains:
        lines += [
            f"  experts: {_trained_weights(model, modules, remedies)}",
            *_adapted_beside(modules),
            *_balanced_by(model, args),
        ]
    return "\n".join(lines)


def write(text: str) -> None:
    """Write to standard error, from the first rank, between the lines of progress bars."""
    if is_first_rank():
        tqdm.write("\n".join(f"sonicmoe-hf: {line}" for line in text.splitlines()), file=sys.stderr)


class FirstStepReport(TrainerCallback):
    """Says at a Trainer's first step what is in force. `attach` adds it; `sonicmoe-hf run` takes it away, and says it of
    all models of a program."""

    def __init__(self) -> None:
        self.is_done = False

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Print the report, once."""
        if not self.is_done and isinstance(model, nn.Module) and is_patched(model):
            write(describe(transformers_model(model), None, True, OF_A_SCRIPT, args))
        self.is_done = True
