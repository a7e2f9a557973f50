"""up and down that read packed weights: interpreted on a CPU (or run, where there is a GPU) against the eager backend
on the dequantized weights, and their PTX, which the interpreter does not run, by a small interpreter of its own.

Tolerances: fp32 sums in another order as in test_triton.py; in bf16 on a GPU, one rounding of the result.
"""

import re
import struct
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers import tapes
from helpers.marks import crossed
from kernel_helpers import errors, relative_error
from moe_problems import AdaptedLayer, adapter, layer, packed_adapter, poisoned, routing_ids
from torch.utils.checkpoint import checkpoint

from benchmarks.layer.quantized_layer import never_read_packed
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.kernels import eager, tape
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Activation, PackedOperand, is_gated
from sonicmoe_hf.kernels.packed import FORMATS, Quantized, nf4
from sonicmoe_hf.kernels.triton import packed_tile
from sonicmoe_hf.layer.moe_experts import moe_experts

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def problem(name, T, H, I, E, K, kind, device, dtype, interleaved=False, activation="swiglu"):
    """Make a layer's tensors with gate_up and down packed, the same with what these stand for, and rows by both
    backends."""
    ids = routing_ids(T, E, K, kind, device, empty=(1,))
    tensors, _ = layer(T, H, I, E, ids[0].numel(), dtype, device, activation=activation)
    halves = "interleaved" if interleaved else "concatenated"
    orders = {"gate_up": halves if is_gated(activation) else "whole", "down": "whole"}
    rows = [backend.dispatch(*ids, T, E, kind != "top_k") for backend in (eager, kernels)]
    if I % FORMATS[name].block:
        del orders["down"]  # of which this format takes no rows of I
    packed = {
        weight: PackedOperand(*FORMATS[name].quantize(tensors[weight], order), name)
        for weight, order in orders.items()
    }
    dense = {weight: FORMATS[name].dequantize(Quantized(*stored[:3]), dtype) for weight, stored in packed.items()}
    return tensors | packed, tensors | dense, rows


PROBLEMS = [
    (20, 320, 64, "list", True, 3, "clamped_swiglu"),  # two steps of the depth, the second cut; several tiles of rows
    (11, 192, 96, "top_k", False, 20, "relu2"),
    (12, 128, 64, "top_k", False, 20, "clamped_swiglu"),  # 12 rows of two experts, eight at a time
    (1, 192, 96, "top_k", False, 0, "relu2"),  # gate_up has I rows, no multiple of a tile's height
    (1, 64, 64, "top_k", False, 0, "clamped_swiglu"),
]


@pytest.mark.parametrize("problem_of, name", crossed(PROBLEMS, FORMATS, everywhere=2), ids=str)
def test_up_and_down_agree_with_the_eager_backend(device, name, problem_of):
    (T, H, I, kind, interleaved, rank, activation), E, K = problem_of, 3, 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "mxfp4" and is_gated(
        activation
    ):  # its rows are multiples of 32, and tiles of the weight's rows are cut
        H, I = H - 32, I - 32
    elif name in ("fp8", "nvfp4") and rank:  # blocks of 128 are cut in every dimension, tiles and steps too
        T, H, I = (2, 144, 144) if interleaved else (1, 80, 192)
    packed, dense, rows = problem(name, T, H, I, E, K, kind, device, dtype, interleaved, activation)
    x, act = packed["x"], Activation(activation, 1.702, 1.0)
    extra = {"gate_up": None, "down": None}
    if rank:
        for weight in extra:
            adapted = packed_adapter(*adapter(E, rank, *dense[weight].shape[:0:-1], device), 0.7, dense[weight])
            extra[weight] = adapted.term(torch.randn(rows[0].token.numel(), rank + -rank % 8).to(x))

    # in bf16 a square doubles the error of h, which is rounded once
    tolerance = 1e-2 if activation == "relu2" and dtype == torch.bfloat16 else TOLERANCE[dtype]

    def results(backend, rows, t, a=None):
        up = x, t["gate_up"], t["gate_up_bias"], rows, act, interleaved
        h, own = backend.up(*up, True, True, extra["gate_up"])
        only_h, nothing = backend.up(*up, True, False, extra["gate_up"])
        assert nothing is None and torch.equal(only_h[: rows.offsets[-1]], h[: rows.offsets[-1]])
        a = own if a is None else a
        y = backend.down(a, t["down"], t["down_bias"], rows, extra["down"])
        num_rows = rows.offsets[-1]
        return {"h": h[:num_rows], "a": own[:num_rows], "y": y[:num_rows]}, a

    expected, a = results(eager, rows[0], dense)
    with poisoned():
        found, _ = results(kernels, rows[1], packed, a)
    assert {n: e for n, e in errors(found, expected).items() if e > tolerance} == {}
    h, a = kernels.up(x, packed["gate_up"], None, rows[1], act, interleaved, False, True)
    assert h is None and a.shape == (rows[1].token.numel(), I)


@pytest.mark.parametrize("layout, name", crossed(["concatenated", "transposed_concatenated"], FORMATS, everywhere=2))
def test_a_packed_layer_without_gates_is_the_layer_of_its_values(layout, name):
    problem = AdaptedLayer(
        0, layout, 20, 64, 64, 2, 1, "cpu", torch.float32, name, empty=(), bias=False, activation="relu2"
    )
    expected = problem.step("eager", torch.float32, dense=True)
    for backend in ("eager", "triton"):
        found = problem.step(backend, torch.float32)
        assert {n: e for n, e in errors(found, expected).items() if e > 2e-5} == {}, backend


@pytest.mark.parametrize("name", FORMATS)
def test_codes_off_the_multiples_of_16_bytes_are_read(device, name):
    packed = FORMATS[name].quantize(torch.randn(2, 64, 64, device=device))
    codes = torch.cat([packed.codes.flatten()[:1], packed.codes.flatten()])[1:].view(packed.codes.shape)
    assert codes.data_ptr() % 4
    rows = kernels.dispatch(torch.tensor([[0, 1]], device=device), None, 1, 2, False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(1, 64, device=device).to(dtype)
    up = [
        kernels.up(x, PackedOperand(stored, *packed[1:], name), None, rows, Activation(), False, True, False)[0]
        for stored in (codes, packed.codes)
    ]
    assert torch.equal(*up)
    weights = (kernels.dequantize(stored, *packed[1:], name, torch.float32, rows) for stored in (codes, packed.codes))
    assert torch.equal(*weights)


@pytest.fixture
def recorded_layer(device, monkeypatch):
    """Make a small layer's packed weights and its expansions, a number for each; launches are recorded at once."""
    E, H, I = 2, 64, 64
    monkeypatch.setattr(tape, "RECORDED_CALL", 1)
    expanded, dequantize = [], kernels.dequantize
    monkeypatch.setattr(kernels, "dequantize", lambda *args: expanded.append(1) or dequantize(*args))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = {"nf4": (E, 2 * I, H), "mxfp4": (E, H, I)}
    packed = [PackedWeight.quantize((torch.randn(s, device=device) / 8).to(dtype), f) for f, s in shapes.items()]

    def inputs(tokens):
        routing = torch.randint(E, (tokens, 1), device=device), torch.ones(tokens, 1, device=device)
        return torch.randn(tokens, H, device=device, dtype=dtype), routing

    yield packed, inputs, expanded
    tapes.forget()


def set_limits(monkeypatch, **limits):
    for name, number in limits.items():
        monkeypatch.setattr(f"sonicmoe_hf.kernels.triton.config.{name}", dict.fromkeys(FORMATS, number))


def test_a_layer_expands_no_weight_for_few_rows_and_every_weight_for_many(recorded_layer, monkeypatch):
    (gate_up, down), inputs, expanded = recorded_layer
    set_limits(monkeypatch, MAX_PACKED_ROWS=1)
    # the last as benchmarks/layer/quantized_layer.py has it, after a call of this size
    for tokens, times, chosen in ((2, 0, nullcontext), (3, 2, nullcontext), (2, 2, never_read_packed)):
        x, routing = inputs(tokens)
        with chosen():
            found = moe_experts(x, gate_up, down, routing, backend="triton")
        assert len(expanded) == times
        expected = moe_experts(x, gate_up.dequantize(), down.dequantize(), routing, backend="eager")
        assert relative_error(found, expected) <= 2 * TOLERANCE[x.dtype]
        expanded.clear()


@pytest.mark.pinned
@pytest.mark.parametrize("reads_packed", [False, True])
def test_a_recomputed_layers_weights_are_expanded_for_its_backward_too(reads_packed, recorded_layer, monkeypatch):
    """Launches are recorded from the first call on; also where forward reads them packed."""
    packed, inputs, expanded = recorded_layer
    set_limits(monkeypatch, MAX_PACKED_ROWS=2 * reads_packed, MAX_PACKED_ROWS_BESIDE_EXPANDED=1)
    x, routing = inputs(3)
    x.requires_grad_()

    def gradient(run):
        expanded.clear()
        out = run(lambda x: moe_experts(x, *packed, routing, backend="triton"), x)
        return torch.autograd.grad(out.float().square().sum(), x)[0]

    expected = gradient(lambda layer, x: layer(x))
    assert len(expanded) == (2 if reads_packed else 4)
    for _ in range(2):  # forward is on tapes by now, then all but the expansions
        found = gradient(partial(checkpoint, use_reentrant=False))
        assert relative_error(found, expected) <= 2 * TOLERANCE[x.dtype] * reads_packed
        assert len(expanded) == 2


def bf16_of(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def bf16_bits(value):
    return torch.tensor(value, dtype=torch.float64).to(torch.bfloat16).view(torch.uint16).item()


def run_ptx(text, inputs, shared=None, thread=0, threads=32):
    """Run the instructions of one thread and return its registers; `shared` is the memory of all, by address."""
    registers = {"%tid.x": thread, "%laneid": thread % 32, "%ntid.x": threads, "pairs": 1024} | inputs

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    def permuted(a, b, selector):
        assert not selector & 0x8888, "this would copy signs"
        sources = (b << 32 | a).to_bytes(8, "little")
        return sum(sources[selector >> 4 * i & 7] << 8 * i for i in range(4))

    def fused(*abc):
        values = ([bf16_of(value(each) >> s & 0xFFFF) for each in abc] for s in (0, 16))
        return sum(bf16_bits(a * b + c) << s for s, (a, b, c) in zip((0, 16), values))

    operations = {
        "shr.b32": lambda a, d: (value(a) & 0xFFFFFFFF) >> value(d),
        "and.b32": lambda a, b: value(a) & value(b),
        "or.b32": lambda a, b: value(a) | value(b),
        "add.u32": lambda a, b: value(a) + value(b),
        "mul.lo.u32": lambda a, b: value(a) * value(b) & 0xFFFFFFFF,
        "mad.lo.u32": lambda a, b, c: value(a) * value(b) + value(c),
        "mad.wide.u32": lambda a, b, c: value(a) * value(b) + value(c),
        "lop3.b32": lambda a, b, c, table: value(a) & value(b) | value(c) if value(table) == 0xEA else None,
        "setp.lt.u32": lambda a, b: value(a) < value(b),
        "prmt.b32": lambda a, b, s: permuted(value(a), value(b), value(s)),
        "fma.rn.bf16x2": fused,
        "mov.b32": value,
        "mov.u32": value,
        "ld.global.nc.b32": lambda address: value(address.strip("[]")),  # stands for what is there
        "ld.shared.b32": lambda address: shared[value(address.strip("[]"))],
    }
    lines = [line.strip() for line in re.findall(r"[^;:{}]*(?:\{[^}]*\})?[;:]", text.strip()[1:-1])]
    at = 0
    while at < len(lines):
        operation, *rest = lines[at].rstrip(";").split(None, 1)
        at += 1
        if operation.endswith(":") or operation in (".reg", ".shared", "bar.sync"):
            continue
        operands = [operand.strip() for operand in rest[0].split(",")]
        if operation.startswith("st.shared"):
            name, _, offset = operands[0].strip("[]").partition("+")
            first = value(name) + int(offset or 0)
            assert first % (4 * len(operands[1:])) == 0
            shared.update({first + 4 * i: value(operand.strip("{} ")) for i, operand in enumerate(operands[1:])})
        elif operation == "@more":
            at = lines.index(f"{rest[0].split()[1]}:") if registers["more"] else at
        else:
            registers[operands[0]] = operations[operation](*operands[1:])
    return registers


def pairs_of_word(text, inputs, shared=None):
    found = run_ptx(text, inputs, shared)
    return [value for i in range(4) for value in (found[f"${i}"] & 0xFFFF, found[f"${i}"] >> 16)]


@pytest.mark.pinned
def test_the_instructions_of_nf4_find_the_values_of_every_byte_in_the_lanes_own_bank():
    shared = {}
    tables = [run_ptx(packed_tile.NF4_TABLE.value, {"$1": 8000}, shared, thread, 64)["$0"] for thread in range(64)]
    code = torch.arange(256)
    expected = torch.tensor(nf4.NF4_VALUES)[torch.stack([code >> 4, code & 15], -1)] / packed_tile.NF4_FACTOR
    expected = expected.to(torch.bfloat16).view(torch.uint16).flatten().tolist()
    for lane in (0, 1, 31, 63):
        assert (tables[lane] - 1024) % 128 == 4 * (lane % 32)
        for first in range(0, 256, 4):
            word = sum((first + i) << 8 * i for i in range(4))
            found = pairs_of_word(packed_tile.NF4_OF_WORD.value, {"$4": word, "$5": tables[lane]}, shared)
            assert found == expected[2 * first : 2 * first + 8]
            assert pairs_of_word(packed_tile.NF4_BY_PERMUTATIONS.value, {"$4": word}) == found
        behind = [shared[(tables[lane] & -128) + 32768 + 4 * i] for i in range(256)]
        assert behind == [8000 + 4 * i for i in range(256)]


@pytest.mark.pinned
@pytest.mark.parametrize("scale", [0, 1, 2, 120, 127, 128, 250, 254, 255])
def test_the_instructions_of_mxfp4_give_the_codecs_values(scale):
    half = (scale - 1) << 7 if scale > 1 else (scale + 1) << 5
    for word in (0x76543210, 0xFEDCBA98, 0x8091A2B3, 0x0F1E2D3C):  # every code, in both halves
        found = pairs_of_word(packed_tile.MXFP4_OF_WORD.value, {"$4": word, "$5": half | half << 16})
        codes = torch.tensor(list(word.to_bytes(4, "little")) + [0] * 12, dtype=torch.uint8).view(1, 1, 1, 16)
        packed = Quantized(codes, torch.tensor([[[scale]]], dtype=torch.uint8))
        values = FORMATS["mxfp4"].dequantize(packed, torch.bfloat16).view(torch.uint16).flatten().tolist()
        assert found == [values[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]


@pytest.mark.pinned
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", [0, 1, 8, 15, 16])
def test_the_instructions_of_int4_round_the_codecs_values_once(zero, dtype):
    less = (0xC300 + zero) * 0x10001
    for scale in torch.tensor([1.0, -1.0039, 0.0123, 5e-5, -987.6], dtype=dtype):
        high = scale.to(torch.bfloat16)
        parts = {"$6": high, "$7": (scale.float() - high.float()).to(torch.bfloat16)}
        twice = {name: part.view(torch.uint16).item() * 0x10001 for name, part in parts.items()}
        for word in (0x76543210, 0xFEDCBA98):  # every code
            text = packed_tile.INT4_OF_WORD if dtype == torch.bfloat16 else packed_tile.INT4_OF_WORD_BESIDE
            found = pairs_of_word(text.value, {"$4": word, "$5": less} | twice)
            codes = torch.tensor(list(word.to_bytes(4, "little")) * 4, dtype=torch.uint8).view(1, 1, 16)
            zeros = torch.tensor([[[zero]]], dtype=torch.uint8)
            values = FORMATS["uint4"].dequantize(Quantized(codes, scale.view(1, 1, 1), zeros), torch.float32)
            values = (values + 0.0).to(torch.bfloat16).view(torch.uint16).flatten().tolist()
            assert [bits % 0x8000 and bits for bits in found] == [values[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]


@pytest.mark.pinned
def test_the_instructions_of_fp8_give_every_value():
    codes = [code for code in range(256) if code & 127 != 127]
    for first in range(0, len(codes), 8):
        some = (codes + codes)[first : first + 8]
        words = [sum(code << 8 * i for i, code in enumerate(some[4 * word : 4 * word + 4])) for word in (0, 1)]
        found = pairs_of_word(packed_tile.FP8_OF_WORDS.value, {"$4": words[0], "$5": words[1]})
        expected = torch.tensor(some, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
        assert found == expected.view(torch.uint16).tolist()


@pytest.mark.pinned
def test_values_of_nf4_beside_their_factor_err_half_as_much_as_in_bf16():
    exact = torch.tensor(nf4.NF4_VALUES, dtype=torch.float64)
    factor = packed_tile.NF4_FACTOR
    found = (exact / factor).to(torch.bfloat16).double() * factor
    assert ((found - exact).abs() <= 2**-9 * exact.abs()).all()
    values = torch.linspace(0.08, 1, 10**5, dtype=torch.float64)
    rounding = (values.to(torch.bfloat16).double() / values - 1).square().mean().sqrt()
    assert (found - exact).norm() < rounding * exact.norm() / 2
