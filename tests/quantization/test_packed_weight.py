"""PackedWeight: what it looks like from outside, what leaves it intact, and what it refuses."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from helpers.models import through_a_file
from torch import nn

from sonicmoe_hf import PackedWeight
from sonicmoe_hf.formats.state_dicts import hold_packed
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.layer.packed_weight import as_parameter, kind_of

E, N, K = 3, 8, 64


def dense():
    return torch.randn(E, N, K).bfloat16()


@pytest.fixture(params=[(name, transposed) for name in FORMATS for transposed in (False, True)], ids=str)
def weight(request):
    name, transposed = request.param
    return PackedWeight.quantize(dense().transpose(1, 2) if transposed else dense(), name, transposed)


class Experts(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(E))
        hold_packed(self, "weight", weight)


def same(actual, expected):
    parts = zip(actual.packed, expected.packed)
    return kind_of(actual) == kind_of(expected) and all(
        ours is None or torch.equal(ours, theirs) for ours, theirs in parts
    )


def test_it_has_the_dense_weights_shape_and_dtype_in_half_of_its_bytes_or_less(weight):
    shape = (E, K, N) if weight.is_transposed else (E, N, K)
    parameter = as_parameter(weight)
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, PackedWeight)
    assert (parameter.shape, parameter.dtype, parameter.numel()) == (shape, torch.bfloat16, E * N * K)
    assert not parameter.requires_grad
    assert weight.dequantize().shape == shape and weight.dequantize(torch.float32).dtype == torch.float32
    state = 0 if weight.state is None else weight.state.nbytes
    assert weight.nbytes - state <= (8.1 if weight.format == "fp8" else 4.5) / 8 * E * N * K


def test_conversion_from_either_order_gives_the_same_values():
    values = dense()
    for name in FORMATS:
        straight = PackedWeight.quantize(values, name)
        turned = PackedWeight.quantize(values.transpose(1, 2).contiguous(), name, is_transposed=True)
        assert torch.equal(straight.dequantize(), turned.dequantize().transpose(1, 2))


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda weight: pickle.loads(pickle.dumps(weight)),
        lambda weight: weight.to("cpu"),
        torch.Tensor.half,
        torch.Tensor.float,
        torch.Tensor.clone,
        torch.Tensor.detach,
    ],
    ids=["deepcopy", "pickle", "to", "half", "float", "clone", "detach"],
)
def test_copies_and_casts_leave_it_intact(weight, change):
    assert same(change(as_parameter(weight)), weight)


def test_what_compilers_take_it_apart_into_makes_it_again(weight):
    names, context = weight.__tensor_flatten__()
    parts = {name: getattr(weight, name) for name in names}
    again = PackedWeight.__tensor_unflatten__(parts, context, weight.shape, weight.stride())
    assert same(again, weight) and again.dtype == weight.dtype


def test_a_module_is_moved_and_cast_around_it(weight):
    module = Experts(weight)
    module.half()
    assert module.bias.dtype == torch.float16 and same(module.weight, weight)
    module.to("meta")
    assert module.weight.is_meta and module.weight.codes.is_meta
    module.to_empty(device="cpu")
    assert module.weight.codes.device.type == "cpu"
    assert isinstance(copy.deepcopy(module).weight, nn.Parameter)


def test_it_is_shared_between_processes(weight):
    module = Experts(weight.clone()).share_memory()
    assert same(module.weight, weight) and module.weight.is_shared() and module.weight.scales.is_shared()
    assert same(pickle.loads(ForkingPickler.dumps(module.weight)), weight)


def test_state_dicts_hold_plain_tensors_and_load_into_packed_modules(weight):
    module, other = (
        Experts(weight),
        Experts(PackedWeight.quantize(torch.zeros(weight.shape).bfloat16(), weight.format, weight.is_transposed)),
    )
    state = module.state_dict()
    names = [f"_{suffix}" for suffix in FORMATS[weight.format].suffixes]
    assert set(state) == {"bias", *(f"weight{name}" for name in names)}
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    other.load_state_dict(through_a_file(state, weights_only=True))
    assert same(other.weight, weight)
    other.load_state_dict(Experts(weight).state_dict(), assign=True)
    assert same(other.weight, weight)
    del state[f"weight{names[0]}"]
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(state)


def test_a_dense_weight_is_not_loaded_into_a_packed_one(weight):
    with pytest.raises(RuntimeError, match="packed as"):
        Experts(weight).load_state_dict({"bias": torch.zeros(E), "weight": torch.zeros(weight.shape)})


def test_weights_only_files_hold_it(weight):
    loaded = through_a_file(as_parameter(weight), weights_only=True)
    assert isinstance(loaded, nn.Parameter) and same(loaded, weight)


def test_data_is_assigned_from_packed_weights(weight):
    parameter, other = (
        as_parameter(weight.clone()),
        PackedWeight.quantize(torch.randn(weight.shape).bfloat16(), weight.format, weight.is_transposed),
    )
    parameter.data = parameter.data.to(torch.float32)  # prepare_model_for_kbit_training
    assert same(parameter, weight)
    parameter.data = other
    assert same(parameter, other)


def test_a_weight_in_the_other_order_is_not_taken_for_one_of_its_shape():
    square = torch.randn(E, K, K).bfloat16()
    weight, other = (PackedWeight.quantize(square, "nf4", is_transposed) for is_transposed in (False, True))
    for take in (lambda: setattr(as_parameter(weight), "data", other), lambda: weight.copy_(other)):
        with pytest.raises(RuntimeError, match="takes a dense tensor"):
            take()


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight + 1,
        lambda weight: weight.add_(1),
        lambda weight: weight[0],
        lambda weight: weight.transpose(1, 2),
        lambda weight: weight.view(-1),
        lambda weight: torch.randn(3, 8, 8) @ weight,
        lambda weight: weight.copy_(torch.zeros(weight.shape)),
        lambda weight: setattr(as_parameter(weight), "data", torch.zeros(weight.shape)),
        lambda weight: torch.zeros(weight.shape).copy_(weight),
        lambda weight: torch.zeros_like(weight),
        lambda weight: torch.mul(torch.ones(3, 8, 8), 2.0, out=weight),
        lambda weight: weight.split(2, dim=1),
    ],
)
def test_dense_operations_say_what_to_do(weight, use):
    with pytest.raises(RuntimeError, match=rf"takes a dense tensor, .*packed as {weight.format}.*dequantize\(\)"):
        use(weight)


def test_a_gradient_is_refused(weight):
    parameter = as_parameter(weight)
    for ask in (
        parameter.requires_grad_,
        lambda: setattr(parameter, "requires_grad", True),
        lambda: nn.Parameter(weight),
        lambda: Experts(weight).requires_grad_(True),
    ):
        with pytest.raises(RuntimeError, match="frozen and have no gradient; train adapters"):
            ask()
    parameter.requires_grad = False
    assert not parameter.requires_grad
