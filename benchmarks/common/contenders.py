"""Implementations of one MoE layer to compare: functions of (x, gate_up, down, expert_TK, weight_TK) in the hub's layout.

`CONTENDERS` maps names to makers; a maker raises `Unavailable` with a reason where its package or GPU is missing.
"""

from __future__ import annotations

import functools
import importlib

import torch
import torch.nn.functional as F

from benchmarks.common.shapes import Shape, activated
from sonicmoe_hf.layer import backends
from sonicmoe_hf.layer.moe_experts import moe_experts


class Unavailable(Exception):
    """Raised where a contender cannot run here; the message has the reason."""


def peer_module(name):
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise Unavailable(f"{name}: {error}") from error


def ours(shape: Shape, backend: str):
    try:
        backends.choose(torch.device("cpu" if backend == "eager" else "cuda"), torch.bfloat16, backend)
        backends.load(backend)
    except (ValueError, ImportError) as error:
        raise Unavailable(str(error)) from error
    return lambda x, gate_up, down, expert, weight: moe_experts(
        x, gate_up, down, (expert, weight), activation=shape.activation, backend=backend
    )


def grouped_mm(shape: Shape):
    """Compute as Transformers' experts_implementation="grouped_mm" does."""
    moe, is_gated = peer_module("transformers.integrations.moe"), shape.activation == "swiglu"

    class Experts:
        num_experts, has_gate, has_bias, is_transposed, has_post_expert_norm = shape.E, is_gated, False, False, False
        _is_expert_parallel = False
        act_fn = staticmethod(F.silu if is_gated else lambda h: activated(h, shape.activation))
        _apply_gate = moe._default_apply_gate

    def layer(x, gate_up, down, expert, weight):
        experts = Experts()
        setattr(experts, "gate_up_proj" if is_gated else "up_proj", gate_up)
        experts.down_proj = down
        return moe.grouped_mm_experts_forward(experts, x, expert, weight)

    return layer


def scattermoe(shape: Shape):
    """Build the layer of ScatterMoE (kernels-community/scattermoe), the other Triton implementation."""
    peer = peer_module("scattermoe")

    def layer(x, gate_up, down, expert, weight):
        order = peer.flatten_sort_count(expert, num_experts=shape.E)
        h = peer.parallel_linear(x, gate_up.transpose(2, 1), shape.K, *order, grouped_in=False, grouped_out=True)
        a = activated(h, shape.activation)
        return peer.parallel_linear(
            a, down.transpose(2, 1), 1, *order, grouped_in=True, grouped_out=False, gates=weight
        )

    return layer


def upstream(shape: Shape):
    """Build the layer of the kernels behind Transformers' experts_implementation="sonicmoe"; its first calls tune for
    minutes."""
    if shape.activation != "swiglu":
        raise Unavailable(f"activation {shape.activation} is not compared")
    peer = peer_module("sonic_moe")
    swiglu = peer_module("sonic_moe.enums").ActivationType("swiglu")

    def layer(x, gate_up, down, expert, weight):
        token = torch.arange(shape.T, device=x.device, dtype=torch.int32).repeat_interleave(shape.K)
        out, _ = peer.moe_general_routing_inputs(
            x,
            weight.reshape(-1).float(),
            token,
            expert.reshape(-1).int(),
            gate_up.permute(1, 2, 0),
            None,
            down.permute(1, 2, 0),
            None,
            E=shape.E,
            activation_type=swiglu,
            stream_id=torch.cuda.current_stream().cuda_stream,
            is_inference_mode_enabled=False,
            concat_layout=True,
        )
        return out

    return layer


def liger(shape: Shape):
    """Compute as LigerExperts does, which `use_liger_kernel=True` puts into nine families; it tunes for minutes at each
    new size of an expert, or not at all where LIGER_FUSED_MOE_AUTOTUNE is 0."""
    if shape.activation != "swiglu":
        raise Unavailable(f"activation {shape.activation} is not compared")
    function = peer_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    return lambda x, gate_up, down, expert, weight: function.apply(x, gate_up, down, expert.int(), weight)


class _DenseTwin(torch.autograd.Function):
    """The layer's six products as dense ones over the same R rows, and nothing else: what cuBLAS would take."""

    @staticmethod
    def forward(ctx, x, gate_up, down, rows_x, rows_h, rows_a, rows_y):
        ctx.save_for_backward(gate_up, down, rows_x, rows_h, rows_a, rows_y)
        torch.mm(rows_x, gate_up[0].T, out=rows_h)
        torch.mm(rows_a, down[0].T, out=rows_y)
        return rows_y[: x.shape[0]]

    @staticmethod
    def backward(ctx, dout):
        gate_up, down, rows_x, rows_h, rows_a, rows_y = ctx.saved_tensors
        torch.mm(rows_y, down[0], out=rows_a)
        torch.mm(rows_h, gate_up[0], out=rows_x)
        if ctx.needs_input_grad[1]:
            torch.mm(rows_h.T, rows_x)
            torch.mm(rows_y.T, rows_a)
        return rows_x[: dout.shape[0]], None, None, None, None, None, None


def dense_bound(shape: Shape):
    rows = [
        torch.randn(shape.T * shape.K, n, device="cuda", dtype=torch.bfloat16)
        for n in (shape.H, shape.width, shape.I, shape.H)
    ]
    return lambda x, gate_up, down, expert, weight: _DenseTwin.apply(x, gate_up, down, *rows)


BOUND = "dense cuBLAS (bound)"
EAGER = "eager"  # on a CPU
TUNED = {"sonicmoe (Transformers)": upstream, "Liger": liger}  # they run where they are asked for
CONTENDERS = {
    "hopper": functools.partial(ours, backend="hopper"),
    "triton": functools.partial(ours, backend="triton"),
    **TUNED,
    "ScatterMoE": scattermoe,
    "grouped_mm": grouped_mm,
    BOUND: dense_bound,
    EAGER: functools.partial(ours, backend=EAGER),
}
ON_CPU = (EAGER, "grouped_mm")


def available(names, shape: Shape):
    """Build name -> layer of the contenders that can run here; print which cannot."""
    layers = {}
    for name in names:
        try:
            layers[name] = CONTENDERS[name](shape)
        except Unavailable as reason:
            print(f"  {name} is left out: {reason}", flush=True)
    return layers
