"""Launching in little host time on a GPU, and what it must not change: alignment, compilation, profilers, and the ops'
contracts."""

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from kernel_helpers import errors, same_bits
from moe_problems import check_contracts, forward_of, run
from test_triton_gpu import problem
from triton import knobs

from sonicmoe_hf.kernels.triton import launch as launching
from sonicmoe_hf.kernels.triton.launch import launch_kernel

pytestmark = pytest.mark.gpu
OURS = torch.ops.sonicmoe_hf


def shifted(tensor):
    """Copy to an address that is no multiple of 16."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


@triton.jit(do_not_specialize=["count"])
def add_one_kernel(source, to, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + place, tl.load(source + place, mask=place < count) + 1, mask=place < count)


@triton.jit
def specialised_kernel(to, number):
    tl.store(to, number)


def test_a_kernel_runs_for_every_alignment_dtype_and_option_in_any_order():
    base = torch.arange(1000, device="cuda")
    for _ in range(2):
        for dtype in (torch.int64, torch.int32, torch.float32):
            for offset in (0, 1, 2, 4):
                source = base.to(dtype)[offset : offset + 500]
                for warps in (4, 8):
                    to = torch.zeros_like(source)
                    launch_kernel(add_one_kernel, (4,), (source, to), (500,), (128,), num_warps=warps)
                    assert torch.equal(to, source + 1), (dtype, offset, warps)


def test_a_kernel_that_triton_would_compile_for_a_number_is_refused():
    with pytest.raises(ValueError, match="specialised_kernel must name its numbers in do_not_specialize"):
        launch_kernel(specialised_kernel, (1,), (torch.zeros(1, dtype=torch.int32, device="cuda"),), (3,))


def test_operands_off_the_multiples_of_16_bytes(backend):
    """Allow for the same sums in another order: bf16 roundings apart, 2^-9 each."""
    tensors, dout, ids = problem(2000, bias=True)
    aligned = run(tensors, dout, ids, "concatenated", "swiglu", backend)
    off = {name: shifted(tensor) for name, tensor in tensors.items()}
    found = run(off, shifted(dout), (shifted(ids[0]), None), "concatenated", "swiglu", backend)
    assert {n: e for n, e in errors(found, aligned).items() if e > 5e-3} == {}
    again = run(tensors, dout, ids, "concatenated", "swiglu", backend)
    assert same_bits(again, aligned)


def test_compiled_whole_it_gives_the_same_bits(backend):
    tensors, dout, (expert, _) = problem(2000, bias=True)

    forward = forward_of(expert, backend)

    def step(function):
        leaves = [t.detach().requires_grad_() for t in tensors.values()]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    torch._dynamo.reset()
    compiled = step(torch.compile(forward, fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(compiled, step(forward)))


def test_the_ops_keep_their_contracts(backend):
    tensors, dout, ids = problem(700, bias=True)
    check_contracts(tensors, dout, ids, 16, backend, sentinels=False)


def test_it_runs_on_the_current_stream(backend):
    """Inputs that a stream still waits for are read after they have come, forward and backward."""
    tensors, dout, ids = problem(2000, bias=True)
    expected = run(tensors, dout, ids, "concatenated", "swiglu", backend)
    late = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # cycles, about 50 ms
        for name, tensor in tensors.items():
            late[name].copy_(tensor)
        found = run(late, dout, ids, "concatenated", "swiglu", backend)
    side.synchronize()
    assert same_bits(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_it_runs_on_the_tensors_gpu(backend):
    """Another than the current one."""
    tensors, dout, ids = problem(2000, bias=True)
    expected = run(tensors, dout, ids, "concatenated", "swiglu", backend)
    elsewhere = {name: tensor.to("cuda:1") for name, tensor in tensors.items()}
    ids = [None if tensor is None else tensor.to("cuda:1") for tensor in ids]
    assert torch.cuda.current_device() == 0
    found = run(elsewhere, dout.to("cuda:1"), ids, "concatenated", "swiglu", backend)
    assert all(found[name].device.index == 1 for name in expected)
    assert all(torch.equal(found[name].cpu(), expected[name].cpu()) for name in expected)


def test_a_profiler_of_triton_sees_every_launch():
    tensors, dout, ids = problem(2000, bias=True)
    run(tensors, dout, ids, "concatenated", "swiglu", "triton")
    seen = []

    def hook(metadata):
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        run(tensors, dout, ids, "concatenated", "swiglu", "triton")
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert {"dispatch_scan_kernel", "dispatch_place_kernel", "gemm_up_kernel", "gemm_wgrad_kernel"} <= set(seen)
    assert seen.count("combine_kernel") == 2


def test_later_launches_go_past_triton():
    tensors, dout, ids = problem(2000, bias=True)
    run(tensors, dout, ids, "concatenated", "swiglu", "triton", sentinels=False)
    refuse = mock.Mock(side_effect=AssertionError("went through Triton"))
    with mock.patch.object(launching.JITFunction, "run", refuse):
        run(tensors, dout, ids, "concatenated", "swiglu", "triton", sentinels=False)
