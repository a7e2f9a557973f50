"""up and down that read packed weights: interpreted on a CPU (or run, where there is a GPU) against the eager backend on the
dequantised weights, and their PTX, which the interpreter does not run, by a small interpreter of its own.

Tolerances: fp32 sums in another order as in test_triton.py; in bf16 on a GPU, one rounding of the result.
"""

import re

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


def run_ptx(text, inputs, shared, thread=0, threads=32):
    """The registers after the instructions of one thread; `shared` is the memory of all, by address."""
    registers = {"%tid.x": thread, "%laneid": thread % 32, "%ntid.x": threads, "pairs": 1024} | inputs

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    def permuted(a, b, selector):
        assert not selector & 0x8888, "this would copy signs"
        sources = (b << 32 | a).to_bytes(8, "little")
        return sum(sources[selector >> 4 * i & 7] << 8 * i for i in range(4))

    def load(address):
        return shared[value(address.strip("[]"))]

    operations = {
        "shr.b32": lambda a, d: value(a) >> value(d),
        "and.b32": lambda a, b: value(a) & value(b),
        "or.b32": lambda a, b: value(a) | value(b),
        "add.u32": lambda a, b: value(a) + value(b),
        "mad.lo.u32": lambda a, b, c: value(a) * value(b) + value(c),
        "setp.lt.u32": lambda a, b: value(a) < value(b),
        "prmt.b32": lambda a, b, s: permuted(value(a), value(b), value(s)),
        "mov.b32": value,
        "mov.u32": value,
        "ld.shared.b32": load,
    }
    lines = [line.strip() for line in re.findall(r"[^;:{}]*(?:\{[^}]*\})?[;:]", text.strip()[1:-1])]
    at = 0
    while at < len(lines):
        operation, *rest = lines[at].rstrip(";").split(None, 1)
        at += 1
        if operation.endswith(":") or operation in (".reg", ".shared", "bar.sync"):
            continue
        operands = [operand.strip() for operand in rest[0].split(",")]
        if operation == "st.shared.v4.b32":
            first = value(operands[0].strip("[]"))
            assert first % 16 == 0
            shared.update({first + 4 * i: value(operand.strip("{} ")) for i, operand in enumerate(operands[1:])})
        elif operation == "@more":
            at = lines.index(f"{rest[0].split()[1]}:") if registers["more"] else at
        else:
            registers[operands[0]] = operations[operation](*operands[1:])
    return registers


@pytest.mark.parametrize("name, text", [("nf4", packed_tile.NF4_TABLE), ("mxfp4", packed_tile.MXFP4_TABLE)])
def test_the_instructions_find_the_values_of_every_byte_in_the_lanes_own_bank(name, text):
    shared = {}
    tables = [run_ptx(text.value, {}, shared, thread, threads=64)["$0"] for thread in range(64)]
    codes = torch.arange(256, dtype=torch.uint8)
    if name == "nf4":
        codes = torch.stack([codes >> 4, codes & 15], -1).long()
        expected = torch.tensor(quantized.NF4_VALUES)[codes] / packed_tile.NF4_FACTOR
    else:
        codes = torch.stack([codes & 15, codes >> 4], -1).long()
        expected = 2 * torch.tensor([*quantized.E2M1_VALUES, *(-value for value in quantized.E2M1_VALUES)])[codes]
    expected = expected.to(torch.bfloat16).view(torch.uint16).long()
    for lane in (0, 1, 31, 63):
        assert (tables[lane] - 1024) % 128 == 4 * (lane % 32)
        for first in range(0, 256, 4):
            word = sum((first + i) << 8 * i for i in range(4))
            found = run_ptx(packed_tile.VALUES_OF_WORD.value, {"$4": word, "$5": tables[lane]}, shared)
            pairs = [[found[f"${i}"] & 0xFFFF, found[f"${i}"] >> 16] for i in range(4)]
            assert pairs == expected[first : first + 4].tolist()


def test_values_of_nf4_beside_their_factor_err_half_as_much_as_in_bf16():
    exact = torch.tensor(quantized.NF4_VALUES, dtype=torch.float64)
    factor = packed_tile.NF4_FACTOR
    found = (exact / factor).to(torch.bfloat16).double() * factor
    assert ((found - exact).abs() <= 2**-9 * exact.abs()).all()
    values = torch.linspace(0.08, 1, 10**5, dtype=torch.float64)
    rounding = (values.to(torch.bfloat16).double() / values - 1).square().mean().sqrt()
    assert (found - exact).norm() < rounding * exact.norm() / 2


def test_every_scale_of_mxfp4_is_read(device):
    """Also those that neither bf16 nor fp32 have as normal numbers."""
    scales = torch.tensor([0, 1, 2, 64, 126, 127, 200, 250, 254, 255])
    packed = quantize(torch.randn(1, len(scales), 32, device=device), "mxfp4")
    packed.scales.copy_(scales.view(packed.scales.shape))
    packed.codes.fill_(0x11)  # 0.5
    rows = kernels.dispatch(torch.tensor([[0], [0]], device=device), None, 2, 1, False)
    x = torch.tensor([1.0, 2.0**-9], device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    found = kernels.down(x.view(2, 1).expand(2, 32).contiguous(), PackedOperand(*packed, "mxfp4"), None, rows)
    expected = 16 * 2.0 ** (scales - 127).double()
    assert found[0, :-2].tolist() == expected[:-2].tolist() and found[1, 4:].tolist() == (expected[4:] / 512).tolist()
