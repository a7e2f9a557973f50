"""The Triton backend behind torch's ops and compiler, interpreted on a CPU; what needs a GPU is in test_launch_gpu.py."""

import pytest
import torch
from moe_problems import layer, routing_ids, run

from sonicmoe_hf.kernels.interface import Activation
from sonicmoe_hf.kernels.triton.launch import cdiv, next_power_of_2
from sonicmoe_hf.layer.dispatch import dispatch
from sonicmoe_hf.layer.experts_op import Inputs, Options
from sonicmoe_hf.layer.moe_experts import moe_experts
from sonicmoe_hf.layer.routing import Routing

T, H, I, E, K = 21, 24, 16, 3, 2
OURS = torch.ops.sonicmoe_hf


def problem(device, kind="top_k"):
    ids = routing_ids(T, E, K, kind, device)
    tensors, dout = layer(T, H, I, E, T * K, torch.float32, device)
    return tensors, dout, ids


def test_the_ops_keep_their_contracts(device):
    """No result shares memory with an input or another result; the fakes tell sizes and strides."""
    tensors, dout, (expert, token) = problem(device, "list")
    utilities = ("test_schema", "test_faketensor")
    for ids in ((expert, token, T, E, True, "triton"), (expert[: T * K].view(T, K), None, T, E, True, "triton")):
        torch.library.opcheck(OURS.dispatch.default, ids, test_utils=utilities)
    rows = dispatch(expert, T, E, token, sentinels=True, backend="triton")
    inputs = [tensors[n] for n in ("x", "gate_up", "down", "weight", "gate_up_bias", "down_bias")]
    inputs = Inputs(*inputs, *[None] * 4)  # no adapters
    options = Options(*Activation(), False, False, 1.0, 1.0, "triton")
    forward = (*inputs, *rows, *options, True, False, False)
    torch.library.opcheck(OURS.experts_forward.default, forward, test_utils=utilities)
    _, h = OURS.experts_forward(*forward)
    backward = (dout, h, None, None, *inputs, *rows, *options, [tensor is not None for tensor in inputs])
    torch.library.opcheck(OURS.experts_backward.default, backward, test_utils=utilities)


@pytest.mark.slow
def test_compiled_whole_it_gives_the_same_bits(device):
    tensors, dout, (expert, _) = problem(device)

    def forward(x, gate_up, down, weight, gate_up_bias, down_bias):
        return moe_experts(
            x,
            gate_up,
            down,
            Routing(expert, weight.view(expert.shape)),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            backend="triton",
        )

    leaves = [t.detach().requires_grad_() for t in tensors.values()]
    out = torch.compile(forward, fullgraph=True, backend="aot_eager")(*leaves)
    compiled = [out, *torch.autograd.grad(out, leaves, dout)]
    plain = run(tensors, dout, (expert, None), "concatenated", "swiglu", "triton", sentinels=False).values()
    assert all(torch.equal(a, b) for a, b in zip(compiled, plain, strict=True))


def test_the_hosts_arithmetic():
    assert [cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 513)] == [1, 2, 4, 4, 8, 1024]
