"""The Triton backend behind torch's ops and compiler, interpreted on a CPU; what needs a GPU is in test_launch_gpu.py."""

import pytest
import torch
from moe_problems import check_contracts, forward_of, layer, routing_ids, run

from sonicmoe_hf.kernels.triton.launch import cdiv, next_power_of_2

T, H, I, E, K = 21, 24, 16, 3, 2
OURS = torch.ops.sonicmoe_hf


def problem(device, kind="top_k"):
    ids = routing_ids(T, E, K, kind, device)
    tensors, dout = layer(T, H, I, E, T * K, torch.float32, device)
    return tensors, dout, ids


def test_the_ops_keep_their_contracts(device):
    tensors, dout, (expert, token) = problem(device, "list")
    check_contracts(tensors, dout, (expert, token), E, "triton", sentinels=True)
    top_k = expert[: T * K].view(T, K), None, T, E, True, "triton"
    torch.library.opcheck(OURS.dispatch.default, top_k, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_compiled_whole_it_gives_the_same_bits(device):
    tensors, dout, (expert, _) = problem(device)

    leaves = [t.detach().requires_grad_() for t in tensors.values()]
    out = torch.compile(forward_of(expert, "triton"), fullgraph=True, backend="aot_eager")(*leaves)
    compiled = [out, *torch.autograd.grad(out, leaves, dout)]
    plain = run(tensors, dout, (expert, None), "concatenated", "swiglu", "triton", sentinels=False).values()
    assert all(torch.equal(a, b) for a, b in zip(compiled, plain, strict=True))


def test_the_hosts_arithmetic():
    assert [cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 513)] == [1, 2, 4, 4, 8, 1024]
