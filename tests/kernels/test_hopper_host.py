"""Host side of the Hopper backend: which calls go to its kernels and which fall back to Triton, and what the compiled
kernels are called with. Nothing is compiled or launched."""

import operator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from sonicmoe_hf.kernels import hopper
from sonicmoe_hf.kernels.hopper.config import (
    MAX_DECODED_ROWS,
    TALL,
    WIDE,
    PackedKind,
    Tile,
    gemm_down_tiles,
    gemm_wgrad_tiles,
    row_bucket,
)
from sonicmoe_hf.kernels.interface import Activation, LoraTerm, PackedOperand, Rows
from sonicmoe_hf.kernels.packed import FORMATS, Quantized

pytestmark = pytest.mark.pinned

E, T, H, I, P, RANK, SMS = 2, 40, 256, 192, 130, 16, 3
FUNCTIONS = ("up", "down", "up_backward_input", "down_backward", "gate_up_gradient", "down_gradient")
SWIGLU, BF16 = Activation(), torch.bfloat16
COMPILED = ("gemm_up", "gemm_down", "gemm_down_backward", "gemm_wgrad")


def of(*size, dtype=torch.bfloat16):
    return torch.empty(size, dtype=dtype)


def rows_of(num_pairs):
    index = torch.zeros(num_pairs, dtype=torch.int32)
    return Rows(
        torch.zeros(E + 1, dtype=torch.int32), index, index.clone(), index, index, torch.zeros(9, 3, dtype=torch.int32)
    )


def operands(P=P, H=H, I=I, **replaced):
    """Make the operands of every function by name, for so many pairs and of these sizes; `replaced` takes the place of
    some."""
    named = {
        "x": of(T, H),
        "gate_up": of(E, 2 * I, H),
        "gate_up_bias": of(E, 2 * I),
        "down": of(E, H, I),
        "down_bias": of(E, H),
        "a": of(P, I),
        "h": of(P, 2 * I),
        "dout": of(T, H),
        "rows": rows_of(P),
        "weight": of(P, dtype=torch.float32),
        "lora": None,
    }
    return SimpleNamespace(**(named | replaced))


def arguments_of(function, t):
    """Make the arguments of a function of a backend (interface.py)."""
    return {
        "up": (t.x, t.gate_up, t.gate_up_bias, t.rows, SWIGLU, False, True, True, t.lora),
        "down": (t.a, t.down, t.down_bias, t.rows, t.lora),
        "up_backward_input": (t.h, t.gate_up, t.rows, t.lora),
        "down_backward": (t.dout, t.down, t.down_bias, t.h, t.weight, t.rows, SWIGLU, False, True, True, True, t.lora),
        "gate_up_gradient": (t.h, t.x, t.rows, t.gate_up),
        "down_gradient": (t.dout, t.a, t.rows, t.down),
    }[function]


def call(function, t):
    return getattr(hopper, function)(*arguments_of(function, t))


@pytest.fixture
def launched(monkeypatch):
    """Record (function of compiled.py, its parameters, what the kernel is called with) of every launch."""
    launches = []

    def compiling(name):
        return lambda *parameters: lambda *arguments: launches.append((name, parameters, arguments))

    monkeypatch.setattr(hopper, "_compiled", lambda: SimpleNamespace(**{name: compiling(name) for name in COMPILED}))
    monkeypatch.setattr(hopper, "_compile_up", lambda compile_kernel, *parameters: compile_kernel(*parameters))
    monkeypatch.setattr(hopper, "_compile_for_tiles", hopper._compile_for_tiles.__wrapped__)
    monkeypatch.setattr(hopper, "num_sms", lambda device: SMS)
    return launches


@pytest.fixture
def triton(monkeypatch):
    """Replace the Triton backend by one whose functions note that they were called."""
    functions = mock.Mock()
    functions.routing_gradient.side_effect = lambda parts, *_: parts
    monkeypatch.setattr(hopper, "triton", functions)
    return functions


def same(found, expected):
    """Tell whether two lists of arguments are the same numbers and the same tensors, which may be other views."""

    def told(value):
        if isinstance(value, torch.Tensor):
            return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
        return value

    return [told(value) for value in found] == [told(value) for value in expected]


def falls_back(function, t, launched, triton):
    """Tell whether Triton alone computes it, from the same arguments."""
    launched.clear()
    fallback = getattr(triton, function)
    fallback.reset_mock()
    fallback.return_value = of(2, 3, 4)
    found = call(function, t)
    assert len(launched) + fallback.call_count == 1
    if fallback.called:
        assert same([found], [fallback.return_value])
        assert all(map(operator.is_, fallback.call_args.args, arguments_of(function, t)))
    return fallback.called


OPERANDS = {  # of each function, those that kernels read or write 16 bytes at a time
    "up": ("x", "gate_up"),
    "down": ("a", "down"),
    "up_backward_input": ("h", "gate_up"),
    "down_backward": ("dout", "down", "h"),
    "gate_up_gradient": ("h", "x"),
    "down_gradient": ("dout", "a"),
}
WITH_EXTRA = {"up": (2 * I, H), "down": (H, I), "up_backward_input": (H, 2 * I), "down_backward": (I, H)}  # [E, N, K]
TRANSPOSED = "up_backward_input", "down_backward"  # which read the weight, and a factor, in the other order
GATHERED = {"up": "x", "down_backward": "dout", "gate_up_gradient": "x", "down_gradient": "dout"}


def weight_of(function):
    """Name its weight, or for a weight gradient the tensor that it shall look like."""
    return "gate_up" if function in ("up", "up_backward_input", "gate_up_gradient") else "down"


def off_alignment(tensor):
    """Copy a tensor eight bytes further on."""
    return of(tensor.numel() + 4)[4:].view(tensor.shape)


def with_gaps(tensor):
    """Copy a tensor into part of a wider one."""
    return of(*tensor.shape[:-1], tensor.shape[-1] + 8)[..., : tensor.shape[-1]]


def across(tensor):
    """Copy a tensor into the other order of its last two dimensions."""
    return tensor.mT.contiguous().mT


def adapter(function, rank=RANK, change=lambda factor: factor):
    """Make rows and a factor, changed as it is stored, in the order of the weight."""
    columns = WITH_EXTRA[function][0]
    stored = change(of(E, rank, columns) if function in TRANSPOSED else of(E, columns, rank))
    return LoraTerm(of(P, rank), stored.mT if function in TRANSPOSED else stored)


def packed(format, H=H, I=I):
    """Make both weights packed."""
    stored = {"gate_up": FORMATS[format].shapes((E, 2 * I, H)), "down": FORMATS[format].shapes((E, H, I))}
    dtypes = [FORMATS[format].dtypes(field)[0] for field in Quantized._fields]
    return {
        name: PackedOperand(*(each and of(*each, dtype=dtype) for each, dtype in zip(shapes, dtypes)), format)
        for name, shapes in stored.items()
    }


def for_triton(function):
    """Yield (why, operands) of calls that fall back."""
    t, weight = operands(), weight_of(function)
    for name in OPERANDS[function]:
        yield f"{name} off alignment", operands(**{name: off_alignment(getattr(t, name))})
        yield f"{name} in fp32", operands(**{name: getattr(t, name).float()})
    yield "weights with gaps", operands(**{weight: with_gaps(getattr(t, weight))})
    yield "transposed ones", operands(**{weight: with_gaps(getattr(t, weight).mT.contiguous()).mT})
    for hidden, inner in ((64, I), (260, I), (H, 32), (H, 202)):
        yield f"sizes {hidden}, {inner}", operands(P, hidden, inner)
    if function not in ("up_backward_input", "gate_up_gradient"):  # which read 2I where the others read I
        yield "I = 64", operands(P, H, 64)
    yield "no pairs", operands(0)
    if function in ("up", "down_backward"):
        yield "few rows, gathered", operands(2 * 48)
    if function in ("up", "down"):
        yield "packed, few rows", operands(2 * 32, **packed("nf4"))
    if function in WITH_EXTRA:
        lora = adapter(function)
        shrunk, factor = lora
        for why, other in {
            "factor in the other order": lora._replace(
                factor_ENJ=across(factor) if factor.is_contiguous() else factor.contiguous()
            ),
            "factor with gaps": adapter(function, change=with_gaps),
            "factor off alignment": adapter(function, change=off_alignment),
            "factor of fp16": lora._replace(factor_ENJ=factor.half()),
            "rows off alignment": lora._replace(shrunk_PJ=off_alignment(shrunk)),
            "rows with gaps": lora._replace(shrunk_PJ=with_gaps(shrunk)),
            "rows of fp16": lora._replace(shrunk_PJ=shrunk.half()),
            "a rank that is no multiple of eight": adapter(function, 12),
        }.items():
            yield why, operands(lora=other)


def for_hopper(function):
    """Yield (why, operands) of calls that do not."""
    t, weight = operands(), weight_of(function)
    yield "bf16", t
    halves = {name: each.half() for name, each in vars(t).items() if getattr(each, "dtype", None) == torch.bfloat16}
    yield "fp16", operands(**halves)
    yield "transposed weights", operands(**{weight: across(getattr(t, weight))})
    yield "small sizes", operands(P, 72, 72)
    if function in ("up_backward_input", "gate_up_gradient"):
        yield "I = 64", operands(P, H, 64)
    if function not in ("up", "down_backward"):
        yield "few rows", operands(2 * 48)
    if function in WITH_EXTRA:
        for format in MAX_DECODED_ROWS:
            yield format, operands(**packed(format), lora=adapter(function))
        yield "packed, few rows, gathered", operands(2 * 48, **packed("nf4"))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_the_kernels_do_not_take_falls_back_and_nothing_else(launched, triton, function):
    for calls, expected in ((for_triton, True), (for_hopper, False)):
        assert [why for why, t in calls(function) if falls_back(function, t, launched, triton) != expected] == []


@pytest.mark.parametrize("function", WITH_EXTRA)
def test_packed_weights_that_the_kernels_do_not_decode_are_expanded(launched, triton, monkeypatch, function):
    """In fp16, and beside a factor in fp16: Triton takes what expanding gives."""
    expanded = mock.Mock()
    monkeypatch.setattr(hopper, "dequantize", expanded)
    halves = {name: each.half() for name, each in vars(operands()).items() if getattr(each, "dtype", None) == BF16}
    other_factor = adapter(function, change=torch.Tensor.half)
    for t in (operands(**halves | packed("nf4")), operands(**packed("nf4"), lora=other_factor)):
        call(function, t)
        weight = getattr(t, weight_of(function))
        assert expanded.call_args.args == (*weight, t.x.dtype, t.rows) and not launched
        assert expanded.return_value in getattr(triton, function).call_args.args


def test_packed_weights_are_decoded_up_to_a_number_of_rows():
    """Half of the rows are as many where expanding serves forward's products and backward's."""
    (weight, _), limit = packed("nf4").values(), MAX_DECODED_ROWS["nf4"]

    def decoded(mean_rows, *is_expanded, weight=weight, dtype=BF16):
        return hopper.decodes(weight, dtype, rows_of(E * mean_rows), *is_expanded)

    assert [decoded(rows) for rows in (1, limit, limit + 1)] == [True, True, False]
    assert [decoded(rows, True) for rows in (limit // 2, limit // 2 + 1)] == [True, False]
    assert not decoded(1, dtype=torch.float16)
    assert not decoded(1, weight=weight._replace(format="fp8")) and not decoded(
        1, weight=packed("nf4", H=64)["gate_up"]
    )


def test_what_the_kernels_are_called_with_of_a_packed_weight(launched, triton):
    t = operands(**packed("mxfp4"))
    of_gate_up, of_down = [
        (weight.codes.view(torch.int32).view(*weight.scales.shape[:2], -1), weight.scales, None)
        for weight in (t.gate_up, t.down)
    ]
    for function, rest, weights in (
        ("up", (H, I, True, True, True, True, SWIGLU, False, 0, Tile(128, 5)), of_gate_up),
        ("down", (H, I, True, True, 0, Tile(256, 3)), of_down),
        ("up_backward_input", (H, 2 * I, False, False, 0, Tile(256, 3)), of_gate_up),
        ("down_backward", (H, I, False, True, True, True, SWIGLU, False, 0, Tile(192, 4)), of_down),
    ):
        call(function, t)
        _, parameters, arguments = launched.pop()
        assert parameters == (PackedKind("mxfp4", "uint8", 32), *rest), function
        assert same(arguments[1:4], weights), function


@pytest.mark.parametrize("function", GATHERED)
def test_gathered_tensors_of_two_to_the_31_elements_fall_back(launched, triton, monkeypatch, function):
    """The offsets would not fit into 32 bits. Shown with a smaller limit: the first that falls back is the limit
    itself."""
    assert hopper.MAX_ELEMENTS == 1 << 31
    t = operands()
    for more, expected in ((0, True), (1, False)):
        monkeypatch.setattr(hopper, "MAX_ELEMENTS", getattr(t, GATHERED[function]).numel() + more)
        assert falls_back(function, t, launched, triton) == expected


def test_parts_of_dw_of_two_to_the_31_elements_fall_back(launched, triton, monkeypatch):
    t = operands(dout=of(1, H))
    num_partials = 2  # tiles of 128 columns or fewer than 192
    for limit, expected in ((num_partials * P, True), (num_partials * P + 1, False)):
        monkeypatch.setattr(hopper, "MAX_ELEMENTS", limit)
        monkeypatch.setattr(hopper, "tile", lambda *_: hopper.config.Tile(128, 5))
        assert falls_back("down_backward", t, launched, triton) == expected


@pytest.mark.parametrize("function", WITH_EXTRA)
def test_adapters_go_to_the_hopper_kernels(launched, triton, function):
    t = operands(lora=adapter(function))
    assert not falls_back(function, t, launched, triton)
    _, parameters, arguments = launched[0]
    assert RANK in parameters
    for tensor in t.lora:
        assert any(argument is tensor for argument in arguments)


def test_what_the_kernels_are_called_with(launched, triton):
    """Check the launches in the order of the functions in compiled.py; the row of `tiles` with the scheduler's state,
    and the blocks, are last."""
    t = operands()

    def check_launch(kernel, expected_parameters, *expected):
        """Check the launch that was recorded last. Return the tile."""
        name, (dtype, *parameters, tile), arguments = launched.pop()
        assert (name, dtype, tuple(parameters)) == (kernel, torch.bfloat16, expected_parameters)
        assert same(arguments, (*expected, t.rows.tiles, 8, SMS))
        return tile

    of_up = t.x, t.gate_up, t.gate_up_bias, None, None
    h, a = call("up", t)
    check_launch("gemm_up", (H, I, True, True, True, True, SWIGLU, False, 0), *of_up, h, a, t.rows.token)
    assert (h.shape, a.shape) == ((P, 2 * I), (P, I))
    out = call("down", t)
    check_launch("gemm_down", (H, I, True, True, 0), t.a, t.down, t.down_bias, None, None, out, t.rows.token)
    dx = call("up_backward_input", t)
    check_launch("gemm_down", (H, 2 * I, False, False, 0), t.h, t.gate_up.mT, None, None, None, dx, t.rows.token)

    dh, a, parts = call("down_backward", t)
    expected = t.dout, t.down.mT, None, None, t.h, t.weight, dh, a, parts, t.rows.pair, t.rows.token
    tile = check_launch("gemm_down_backward", (H, I, False, True, True, True, SWIGLU, False, 0), *expected)
    assert same(triton.routing_gradient.call_args.args, (parts, t.dout, t.down_bias, t.rows))
    assert parts.shape == (-(-I // tile.columns), P) and parts.dtype == torch.float32

    gradient = call("gate_up_gradient", t)
    check_launch("gemm_wgrad", (2 * I, H, True), t.x, t.h, gradient, t.rows.token, t.rows.offsets)
    gradient = call("down_gradient", t)
    check_launch("gemm_wgrad", (I, H, False), t.dout, t.a, gradient.mT, t.rows.token, t.rows.offsets)
    assert gradient.stride() == t.down.stride()


def test_an_activation_without_a_gate_has_an_up_projection_of_i_rows(launched, triton):
    relu2, t = Activation("relu2"), operands(gate_up=of(E, I, H), gate_up_bias=None, h=of(P, I))
    h, a = hopper.up(t.x, t.gate_up, None, t.rows, relu2, False, True, True)
    assert launched.pop()[1][:-1] == (torch.bfloat16, H, I, True, False, True, True, relu2, False, 0)
    assert h.shape == a.shape == (P, I)
    dh, a, _ = hopper.down_backward(t.dout, t.down, None, t.h, t.weight, t.rows, relu2, False, True, True, True)
    assert launched.pop()[1][:-1] == (torch.bfloat16, H, I, False, True, True, True, relu2, False, 0)
    assert dh.shape == a.shape == (P, I)


def test_the_weights_of_one_expert_alone_have_no_gaps_whatever_its_stride(launched, triton):
    one = of(1, 2 * I, H).as_strided((1, 2 * I, H), (8, H, 1))
    rows = rows_of(P)._replace(offsets=torch.zeros(2, dtype=torch.int32))
    assert not falls_back("up", operands(gate_up=one, gate_up_bias=None, rows=rows), launched, triton)


def test_the_number_of_rows_chooses_among_the_compiled_tiles(launched, triton):
    """H = 512, I = 1536: every kind of tile of `down` is in its table; 384 columns: both of a weight gradient's are."""
    narrow, tall, wide = gemm_down_tiles(512, 1536)
    assert (tall, wide) == (TALL, WIDE) and narrow not in (tall, wide)
    for mean_rows, expected in ((96, narrow), (97, tall), (160, tall), (161, narrow), (447, narrow), (448, wide)):
        call("down", operands(E * mean_rows, 512, 1536))
        assert launched.pop()[1][-1] == expected, mean_rows
    assert row_bucket(E * 448 - 1, E) == 2 and row_bucket(E * 97 - 1, E) == 1, "a mean is rounded up"
    usual, short = gemm_wgrad_tiles(384)
    assert usual != short
    for mean_rows, expected in ((160, usual), (161, short), (320, short), (321, usual)):
        call("gate_up_gradient", operands(E * mean_rows, 384))
        assert launched.pop()[1][-1] == expected, mean_rows


def test_a_launch_is_on_the_tensor_s_gpu(launched, triton, monkeypatch):
    monkeypatch.setattr(hopper, "launching", entered := mock.Mock(side_effect=hopper.launching))
    t = operands()
    call("down", t)
    entered.assert_called_once_with(t.a.get_device())
    assert len(launched) == 1
