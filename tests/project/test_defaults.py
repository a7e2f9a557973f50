"""torch.set_default_dtype and torch.set_default_device, which users set for their own tensors, change none of ours."""

import ast
from pathlib import Path

import numpy
import pytest
import torch
from helpers.checkpoints import make, same_bits, tensors_in
from helpers.models import build

import sonicmoe_hf
from sonicmoe_hf.checkpoints.reading.files import same_bytes
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.routing.call_scale import share_of_batch

FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
)
ROOT = Path(sonicmoe_hf.__file__).parents[1]
SOURCES = [
    path for room in ("sonicmoe_hf", "kernels", "model_patches") for path in sorted((ROOT / room).rglob("*.py"))
]


@pytest.fixture
def other_defaults():
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def calls_without_dtype_or_device(source):
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            named = {keyword.arg for keyword in node.keywords}
            if ast.unparse(node.func.value) == "torch" and not (None in named or {"dtype", "device"} <= named):
                yield f"{source.name}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.pinned
def test_every_tensor_that_is_made_names_its_dtype_and_device():
    found = [call for source in SOURCES for call in calls_without_dtype_or_device(source)]
    assert not found, f"add dtype= and device= to {found}"


@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_are_the_same_under_other_defaults(format, request):
    weight = torch.randn(2, 128, 128)
    packed = FORMATS[format].quantize(weight, "concatenated")
    expected = FORMATS[format].dequantize(packed, torch.float32)
    request.getfixturevalue("other_defaults")
    for ours, wanted in zip(FORMATS[format].quantize(weight, "concatenated"), packed):
        assert wanted is None or same_bytes(ours, wanted)
    assert same_bytes(FORMATS[format].dequantize(packed, torch.float32), expected)


def test_a_servers_routing_is_read_into_host_memory_under_other_defaults(other_defaults):
    mask = numpy.ones((1, 4), dtype=numpy.int64)
    routing = sonicmoe_hf.RecordedRouting.from_server([numpy.tile(numpy.int32([0, 1]), (3, 2, 1))], mask)
    assert [tensor.device.type for tensor in routing.tensors()] == ["cpu"]


def test_a_checkpoint_is_converted_into_the_same_files_under_other_defaults(tmp_path, request):
    make(tmp_path / "hub", "qwen3_moe")

    def conversions(folder):
        sonicmoe_hf.convert_checkpoint(tmp_path / "hub", folder / "packed", quantize="nvfp4")
        sonicmoe_hf.convert_checkpoint(folder / "packed", folder / "back", "hub")
        return [tensors_in(folder / layout) for layout in ("packed", "back")]

    expected = conversions(tmp_path)
    request.getfixturevalue("other_defaults")
    for ours, wanted in zip(conversions(tmp_path / "again"), expected):
        assert same_bits(ours, wanted)


def test_the_share_of_a_step_is_counted_in_fp32_under_other_defaults(other_defaults):
    model = build("qwen3_moe")
    labels = torch.zeros(1, 258, dtype=torch.int64, device="cpu")
    share = share_of_batch(model, {"labels": labels, "num_items_in_batch": torch.tensor(1000, device="cpu")})
    assert share.item() == pytest.approx(0.257, rel=1e-6)  # bf16 has three digits
