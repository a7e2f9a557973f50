"""Tapes: what they compute, allocate and free is what the recorded call did, and a call that a tape
cannot say is made as it is."""

import itertools
import textwrap
import threading
import weakref
from unittest import mock

import pytest
import torch
from helpers import tapes
from helpers.marks import rest_pinned, rest_slow
from kernel_helpers import same_bits
from moe_problems import AdaptedLayer, layer, routing_ids, run

from sonicmoe_hf.kernels import tape
from sonicmoe_hf.kernels.tape import Taped
from sonicmoe_hf.layer.moe_experts import moe_experts
from sonicmoe_hf.layer.packed_weight import PackedWeight

T, H, I, E, K = 11, 32, 32, 3, 2


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(tape, "RECORDED_CALL", 1)


def plain(
    device, layout="concatenated", kind="top_k", dtype=torch.bfloat16, activation="swiglu", save="preactivation"
):
    ids = routing_ids(T, E, K, kind, device)
    tensors, dout = layer(T, H, I, E, ids[0].numel(), dtype, device, activation=activation)
    return lambda: run(tensors, dout, ids, layout, activation, "triton", save=save)


def adapted(device, rank=5, layout="concatenated", **settings):
    problem = AdaptedLayer(rank, layout, T, H, I, E, K, device, empty=(1,), **settings)
    return lambda: problem.step("triton")


def weights_alone(device):
    """Compute gradients of some of the inputs, of which routing weights are none."""
    tensors, dout = layer(T, H, I, E, T * K, torch.bfloat16, device, bias=False)
    ids, _ = routing_ids(T, E, K, "top_k", device)
    leaf = tensors["down"].requires_grad_()

    def step():
        out = moe_experts(
            tensors["x"], tensors["gate_up"], leaf, (ids, tensors["weight"].view(T, K)), backend="triton"
        )
        return {"out": out.detach(), "down": torch.autograd.grad(out, leaf, dout)[0]}

    return step


def in_fp8(device):
    """Compute products of FP8 experts, quantized by 128 columns."""
    tensors, dout = layer(T, 128, 128, E, T * K, torch.bfloat16, device, bias=False)
    ids, _ = routing_ids(T, E, K, "top_k", device)
    orders = {"gate_up": "concatenated", "down": "whole"}
    weights = [PackedWeight.quantize(tensors[name], "fp8", order=order) for name, order in orders.items()]
    leaf = tensors["x"].requires_grad_()

    def step():
        out = moe_experts(leaf, *weights, (ids, tensors["weight"].view(T, K)), compute="fp8", backend="triton")
        return {"out": out.detach(), "x": torch.autograd.grad(out, leaf, dout)[0]}

    return step


PROBLEMS = {
    "FP8 products": in_fp8,
    "adapters": adapted,
    "no gate, sentinels": lambda device: plain(device, kind="sentinels", activation="relu2"),
    "one weight's gradient": weights_alone,
    "adapters of packed experts": lambda device: adapted(device, layout="concatenated", format="mxfp4", bias=False),
    # slow from here
    "fp32, stored transposed, a list": lambda device: plain(device, "transposed_interleaved", "list", torch.float32),
    "h computed again": lambda device: plain(device, save="input"),
    "biases": plain,
    "adapters beyond one pass": lambda device: adapted(device, 40, "transposed_concatenated"),
}


@pytest.mark.parametrize("name", [*rest_pinned(list(PROBLEMS)[:-4]), *rest_slow(list(PROBLEMS)[-4:], 0)])
def test_a_tape_gives_the_bits_of_the_call_for_other_values(device, name, monkeypatch):
    first, second = PROBLEMS[name](device), PROBLEMS[name](device)
    expected = second()
    tapes.forget()
    first()
    refuse = mock.Mock(side_effect=AssertionError("not by tape"))
    for taped in tapes.of_a_layer():
        monkeypatch.setattr(taped, "function", refuse)
    found = second()
    assert same_bits(found, expected)
    assert not {a.untyped_storage().data_ptr() for a in found.values()} & {
        a.untyped_storage().data_ptr() for a in second().values()
    }


def launch(kernel, *tensors):
    """Launch and record as kernels do, which no operation of torch does."""
    recorder = tape.recording()
    if recorder is None:
        return kernel(*tensors)
    with recorder.noting():
        kernel(*tensors)
        recorder.call(kernel, *tensors)


def double_kernel(source, to):
    to.numpy()[:] = 2 * source.numpy()


def doubled(tensors):
    made = tensors[0].new_empty(tensors[0].shape)
    launch(double_kernel, tensors[0], made)
    tensors.clear()
    return [made]


def is_recorded(taped, make):
    """Tell whether calls with such arguments have a tape; each gives what the function gives."""
    for _ in range(2):
        arguments = make()
        expected = taped.function(list(arguments))
        found = taped(list(arguments))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    tapes = taped.tapes.values()
    return any(hasattr(written, "source") for written in tapes)


def test_operations_that_write_and_that_make_are_recorded():
    def function(tensors):
        x, out = tensors[0], tensors[0].new_empty(4, 3)
        torch.mul(x.t(), 2, out=out)
        zeros = out.new_zeros(2, 6)
        zeros[1].copy_(out.view(-1)[6:])
        low, high = zeros.split(1)
        return [(low + high).to(torch.float64), zeros.narrow(1, 1, 2), x.amax(0)]

    assert is_recorded(Taped(function), lambda: [torch.randn(3, 4)])


def test_the_example_of_the_module_is_a_function_and_its_tape():
    rows = [(line[:52], line[52:].strip()) for line in tape.__doc__.splitlines() if line.startswith("    ")]
    scope = {"torch": torch}
    exec(textwrap.dedent("\n".join(left for left, _ in rows)), scope)
    taped = Taped(scope["scaled_sum"])
    taped([torch.randn(4, 8), torch.randn(2, 8)])
    (written,) = taped.tapes.values()
    _, *shown = (right for _, right in rows if right)
    lines = [line.strip() for line in written.source.splitlines()]
    assert [line for line in lines if line in shown] == shown


CONSTANT = torch.randn(4)
UNSAID = {
    "a value that the host reads": lambda tensors: [tensors[0] * float(tensors[0][0])],
    "a tensor from elsewhere": lambda tensors: [tensors[0] * CONSTANT],
    "a result of a number that values decide": lambda tensors: [tensors[0][tensors[0] > 0]],
}


@pytest.mark.parametrize("what", UNSAID)
def test_a_call_that_a_tape_cannot_say_is_made_as_it_is(what, capfd):
    taped = Taped(UNSAID[what])
    assert not is_recorded(taped, lambda: [torch.randn(4)])
    assert capfd.readouterr() == ("", "")
    assert len(taped.tapes) == 1, "and not tried again"


def shifted(size):
    return torch.randn(size + 1)[1:]


def overlapping():
    both = torch.randn(8)
    return [both, both[4:]]


def summed(tensors):
    return [tensors[0][:4] + tensors[1] if len(tensors) > 1 else tensors[0] * 2]


@pytest.mark.parametrize(
    "make", [lambda: [shifted(4)], overlapping, lambda: [torch.randn(0)]], ids=["off", "over", "empty"]
)
def test_tensors_that_no_tape_is_for_leave_none(make):
    taped = Taped(summed)
    assert not is_recorded(taped, make) and not taped.tapes


def test_a_tape_is_not_run_for_tensors_off_16_bytes_and_runs_for_ones_that_share_memory():
    taped = Taped(summed)
    apart = lambda: [torch.randn(8), torch.randn(4)]  # noqa: E731
    assert is_recorded(taped, apart)
    (written,) = taped.tapes.values()
    assert written(apart(), []) and written([shifted(8), torch.randn(4)], []) is None
    for make in (overlapping, lambda: [shifted(8), torch.randn(4)], lambda: [torch.randn(8), shifted(4)]):
        assert is_recorded(taped, make) and len(taped.tapes) == 1


def test_parts_of_one_tensor_are_told_apart():
    """Record parts of one tensor, as those of Rows may be, and weights in one flat buffer."""

    def function(tensors):
        a, b = tensors
        return [a - b, b[4:].clone()]

    def parts(gap):
        whole = torch.randn(64)
        return [whole[32 + gap : 40 + gap], whole[:8]]

    gaps = itertools.cycle((0, 4, 8))
    assert is_recorded(Taped(function), lambda: parts(next(gaps)))


def test_other_sizes_strides_dtypes_and_constants_have_tapes_of_their_own():
    def function(arguments):
        x, (factor,) = arguments
        return [x.new_zeros(x.shape) + x * factor]

    taped = Taped(function)
    for make in (
        lambda: torch.randn(4, 4),
        lambda: torch.randn(4, 8),
        lambda: torch.randn(4, 4).t(),
        lambda: torch.randn(4, 4).double(),
    ):
        for factor in (2, 3):
            assert is_recorded(taped, lambda m=make, f=factor: [m(), (f,)])
    assert len(taped.tapes) == 8


def test_a_tape_frees_what_the_call_freed_when_it_did():
    """The list's own tensor too."""
    alive = []

    def look(*tensors):
        alive[-1].append([reference() is not None for reference in references])

    def function(tensors):
        given, kept = tensors
        tensors.clear()
        first = given * 2
        launch(look, first)
        del given
        second = first + 1
        launch(look, first, second)
        del first
        launch(look, second)
        return [second + kept]

    taped = Taped(function)
    for _ in range(3):
        given = torch.randn(4)
        references = [weakref.ref(given)]
        tensors = [given, torch.randn(4)]
        del given
        alive.append([])
        taped(tensors)
        assert tensors == []
    assert alive[0] == [[True], [False], [False]] and alive[1:] == alive[:1] * 2
    (written,) = taped.tapes.values()
    lines = [line.strip() for line in written.source.splitlines()]
    freed = [line for line in lines if line.startswith("del ") and line != "del _"]
    assert [line[:5] for line in freed[:2]] == ["del t", "del b"]


def test_a_taped_function_that_calls_another_has_its_lines():
    inner = Taped(doubled)

    def function(tensors):
        (x,) = tensors
        tensors.clear()
        return [inner([x])[0] + 1]

    outer = Taped(function)
    inner([torch.randn(4)])
    assert is_recorded(outer, lambda: [torch.randn(4)])


def test_threads_run_one_tape_beside_each_other():
    taped, wrong = Taped(doubled), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            x = torch.randn(64, generator=generator)
            if not torch.equal(taped([x])[0], x * 2):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(taped.tapes) == 1


def test_a_call_that_fails_leaves_no_tape():
    def failing(tensors):
        tensors[0].new_empty(4)
        raise ValueError("out of memory")

    taped = Taped(failing)
    with pytest.raises(ValueError, match="out of memory"):
        taped([torch.randn(4)])
    assert not taped.tapes and tape.recording() is None


@pytest.mark.pinned
def test_what_was_recorded_in_inference_mode_trains(device):
    problem = plain(device)
    expected = problem()
    tapes.forget()
    tensors, _ = layer(T, H, I, E, T * K, torch.bfloat16, device, bias=False)
    ids, _ = routing_ids(T, E, K, "top_k", device)
    with torch.inference_mode():
        moe_experts(
            tensors["x"], tensors["gate_up"], tensors["down"], (ids, tensors["weight"].view(T, K)), backend="triton"
        )
    assert same_bits(problem(), expected)
    tensors["x"].requires_grad_()
    out = moe_experts(
        tensors["x"], tensors["gate_up"], tensors["down"], (ids, tensors["weight"].view(T, K)), backend="triton"
    )
    out.sum().backward()
    assert tensors["x"].grad.isfinite().all()


def test_no_more_tapes_are_kept_than_that(monkeypatch):
    monkeypatch.setattr(tape, "TAPES", 3)
    taped = Taped(doubled)
    for size in range(1, 9):
        taped([torch.randn(size)])
        assert len(taped.tapes) <= 3


def test_sizes_that_come_again_are_recorded_and_others_not(monkeypatch):
    monkeypatch.setattr(tape, "TAPES", 8)
    monkeypatch.setattr(tape, "RECORDED_CALL", 4)
    taped = Taped(doubled)
    for size in range(1, 100):
        for _ in range(3 if size < 20 else 1):
            taped([torch.randn(size)])
        assert not taped.tapes and len(taped._counts) <= 8
    for _ in range(3):
        taped([torch.randn(99)])
    assert len(taped.tapes) == 1


def test_a_launch_is_on_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", entered := mock.MagicMock())
    for device in (-1, 1):
        with tape.launching(device):
            entered.assert_not_called()
    with tape.launching(2):
        entered.assert_called_once_with(2)
        entered.return_value.__enter__.assert_called_once()
        entered.return_value.__exit__.assert_not_called()
    entered.return_value.__exit__.assert_called_once()
