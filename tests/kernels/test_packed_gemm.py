"""up and down that read packed weights: interpreted on a CPU (or run, where there is a GPU) against the eager backend on the
dequantised weights, and their PTX, which the interpreter does not run, by a small interpreter of its own.

Tolerances: fp32 sums in another order as in test_triton.py; in bf16 on a GPU, one rounding of the result.
"""

import re
import struct

import pytest
import torch
from kernel_helpers import errors, relative_error
from moe_problems import layer, poisoned, routing_ids
from test_rank import adapter

from sonicmoe_hf import PackedWeight
from sonicmoe_hf.functional import moe_experts
from sonicmoe_hf.kernels import eager, quantized
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Activation, PackedOperand
from sonicmoe_hf.kernels.quantized import FORMATS, Quantized, quantize
from sonicmoe_hf.kernels.triton import packed_tile
from sonicmoe_hf.low_rank import pack

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def problem(name, T, H, I, E, K, kind, device, dtype):
    """Rows by both backends, x, and gate_up and down: packed, and as they are dequantised."""
    ids = routing_ids(T, E, K, kind, device, empty=(1,))
    tensors, _ = layer(T, H, I, E, ids[0].numel(), dtype, device)
    packed = [quantize(tensors[weight], name) for weight in ("gate_up", "down")]
    dense = [quantized.dequantize(weight, name, dtype) for weight in packed]
    rows = [backend.dispatch(*ids, T, E, kind != "top_k") for backend in (eager, kernels)]
    return tensors, [PackedOperand(*weight, name) for weight in packed], dense, rows


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "T, H, I, kind, interleaved, rank",
    [
        (1, 64, 64, "top_k", False, 0),
        (20, 320, 64, "list", True, 3),  # two steps of the depth, the second cut; several tiles of rows
        (12, 128, 64, "top_k", False, 20),  # 12 rows of two experts, eight at a time
    ],
)
def test_up_and_down_agree_with_the_eager_backend(device, monkeypatch, name, T, H, I, kind, interleaved, rank):
    E, K = 3, 2
    monkeypatch.setattr("sonicmoe_hf.kernels.triton.config.FEW_PACKED_ROWS", 8)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "mxfp4":  # its rows are multiples of 32, and tiles of the weight's rows are cut
        H, I = H - 32, I - 32
    tensors, (gate_up, down), (dense_gate_up, dense_down), rows = problem(name, T, H, I, E, K, kind, device, dtype)
    x, act = tensors["x"], Activation("clamped_swiglu", 1.702, 1.0)
    extra = {"up": None, "down": None}
    if rank:
        for product, weight in (("up", dense_gate_up), ("down", dense_down)):
            adapted = pack(*adapter(E, rank, weight.shape[2], weight.shape[1], device), 0.7, weight)
            extra[product] = adapted.extra_forward(torch.randn(rows[0].token.numel(), rank + -rank % 8).to(x))

    def results(backend, rows, gate_up, down, a=None):
        h, own = backend.up(x, gate_up, tensors["gate_up_bias"], rows, act, interleaved, True, True, extra["up"])
        a = own if a is None else a
        y = backend.down(a, down, tensors["down_bias"], rows, extra["down"])
        num_rows = rows.offsets[-1]
        return {"h": h[:num_rows], "a": own[:num_rows], "y": y[:num_rows]}, a

    expected, a = results(eager, rows[0], dense_gate_up, dense_down)
    with poisoned():
        found, _ = results(kernels, rows[1], gate_up, down, a)
    assert {n: e for n, e in errors(found, expected).items() if e > TOLERANCE[dtype]} == {}
    h, a = kernels.up(x, gate_up, None, rows[1], act, interleaved, False, True)
    assert h is None and a.shape == (rows[1].token.numel(), I)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_off_the_multiples_of_16_bytes_are_read(device, name):
    packed = quantize(torch.randn(2, 64, 64, device=device), name)
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


def test_a_layer_expands_no_weight_for_few_rows_and_every_weight_for_many(device, monkeypatch):
    E, H, I = 2, 64, 64
    monkeypatch.setattr("sonicmoe_hf.kernels.triton.config.PACKED", 1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    gate_up = PackedWeight.quantize((torch.randn(E, 2 * I, H, device=device) / 8).to(dtype), "nf4")
    down = PackedWeight.quantize((torch.randn(E, H, I, device=device) / 8).to(dtype), "mxfp4")
    expanded = []
    dequantize = kernels.dequantize
    monkeypatch.setattr(kernels, "dequantize", lambda *args: expanded.append(1) or dequantize(*args))
    for tokens, times in ((2, 0), (3, 2)):
        x = torch.randn(tokens, H, device=device).to(dtype)
        routing = torch.randint(E, (tokens, 1), device=device), torch.ones(tokens, 1, device=device)
        found = moe_experts(x, gate_up, down, routing, backend="triton")
        assert len(expanded) == times
        expected = moe_experts(x, gate_up.dequantize(), down.dequantize(), routing, backend="eager")
        assert relative_error(found, expected) <= 2 * TOLERANCE[dtype]
        expanded.clear()


def bf16_of(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def bf16_bits(value):
    return torch.tensor(value, dtype=torch.float64).to(torch.bfloat16).view(torch.uint16).item()


def run_ptx(text, inputs):
    """What the instructions leave in $0, $1, ...: 16-bit ints where they are unpacked into, else 32-bit ones."""
    registers = dict(inputs)

    def value(name):
        return registers[name] if name in registers else int(name, 16) if name.startswith("0x") else int(name)

    def single(bits):
        return struct.unpack("<f", struct.pack("<I", bits))[0]

    def permuted(a, b, selector):
        sources = (b << 32 | a).to_bytes(8, "little")
        return sum(sources[selector >> 4 * i & 7] << 8 * i for i in range(4))

    def rounded(exact):  # to fp32, of a product that fp64 holds
        return struct.unpack("<I", struct.pack("<f", exact))[0]

    for line in filter(None, (line.strip() for line in re.sub(r"[{}]?([^;{}]*;)[{}]?", r"\1\n", text).split("\n"))):
        if line.startswith(".reg"):
            continue
        operation, rest = line.rstrip(";").split(None, 1)
        target, *operands = (operand.strip() for operand in rest.split(","))
        registers[target] = {
            "shl.b32": lambda a, d: value(a) << value(d) & 0xFFFFFFFF,
            "shr.b32": lambda a, d: value(a) >> value(d),
            "and.b32": lambda a, b: value(a) & value(b),
            "or.b32": lambda a, b: value(a) | value(b),
            "lop3.b32": lambda a, b, c, table: value(a) & value(b) | value(c) if value(table) == 0xEA else None,
            "prmt.b32": lambda a, b, s: permuted(value(a), value(b), value(s)),
            "mul.rn.f32": lambda a, b: rounded(single(value(a)) * single(int(b[2:], 16))),
            "cvt.rn.bf16x2.f32": lambda a, b: bf16_bits(single(value(a))) << 16 | bf16_bits(single(value(b))),
            "fma.rn.bf16x2": lambda a, b, c: sum(
                bf16_bits(bf16_of(value(a) >> s & 0xFFFF) * bf16_of(value(b) >> s & 0xFFFF)) << s for s in (0, 16)
            ),
            "mov.b32": lambda a: value(a),
        }[operation](*operands)
    return registers


def unpacked_by(text):
    """(target of the low half, of the high half, register) of every unpacking move."""
    return re.findall(r"mov\.b32 \{\$(\d), \$(\d)\}, (\w+);", text)


def values_of_word(text, inputs):
    """$0 .. $7 of instructions that unpack them from pairs."""
    found = {}
    body = text.strip()[1:-1]
    for low, high, register in unpacked_by(body):
        before, _, body = body.partition(f"mov.b32 {{${low}, ${high}}}, {register};")
        inputs = run_ptx(before, inputs)
        found |= {int(low): inputs[register] & 0xFFFF, int(high): inputs[register] >> 16}
    return [found[i] for i in range(8)]


def expected_bits(name, word, scale, state=None):
    codes = torch.tensor([word.to_bytes(4, "little")[i] for i in range(4)] + [0] * 28, dtype=torch.uint8)
    if name == "nf4":
        packed = Quantized(codes.view(1, 1, 32), torch.zeros(1, 1, 1, dtype=torch.uint8), state)
    else:
        packed = Quantized(codes[:16].view(1, 1, 1, 16), torch.tensor([[[scale]]], dtype=torch.uint8), None)
    values = quantized.dequantize(packed, name, torch.bfloat16).view(torch.uint16).flatten()[:8].tolist()
    return values if name == "nf4" else [values[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]


WORDS = (0x76543210, 0xFEDCBA98, 0x8091A2B3, 0x0F1E2D3C)  # every code, as an even and as an odd value


@pytest.mark.parametrize("scale", [0, 1, 2, 120, 127, 128, 250, 254, 255])
def test_the_instructions_of_mxfp4_give_the_codecs_values(scale):
    half = (scale - 1) << 7 if scale > 1 else (scale + 1) << 5
    for word in WORDS:
        found = values_of_word(packed_tile.MXFP4_OF_WORD.value, {"$8": word, "$9": half | half << 16})
        assert found == expected_bits("mxfp4", word, scale)


def test_the_instructions_of_nf4_give_the_codecs_values():
    for absmax in [*torch.randn(5).abs().tolist(), 0.0, 1e-38, -0.25]:
        state = quantize(torch.zeros(1, 1, 64), "nf4").state
        state[quantized.SCALE_OFFSET], state[quantized.SCALE_SCALES] = absmax, 0.0
        bits = state[quantized.SCALE_OFFSET].view(torch.int32).item() & 0xFFFFFFFF
        table = run_ptx(packed_tile.NF4_TABLE.value.strip()[1:-1], {"$8": bits})
        for word in WORDS:
            inputs = {"$8": word} | {f"${i + 9}": table[f"${i}"] for i in range(8)}
            assert values_of_word(packed_tile.NF4_OF_WORD.value, inputs) == expected_bits("nf4", word, None, state)
