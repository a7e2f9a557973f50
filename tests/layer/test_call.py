"""The object that a layer's computation passes on: fields are taken by name, whatever their order and number."""

import ast
import typing
from pathlib import Path

import pytest
import torch

from sonicmoe_hf.kernels.interface import Activation
from sonicmoe_hf.layer import call as calls
from sonicmoe_hf.layer import experts_op
from sonicmoe_hf.layer.call import CALL, LayerCall, Options, Saved, SaveFlags
from sonicmoe_hf.layer.dispatch import dispatch
from sonicmoe_hf.layer.packed_weight import PackedWeight
from sonicmoe_hf.layer.projection import LowRank, Projection, projection

KINDS = (LayerCall, Options, Saved, SaveFlags)
T, H, I, E, K, R = 6, 16, 16, 4, 2, 3
NEEDS = "weight x gate_up_bias gate_up_a gate_up_b down_bias down_a down_b"


def turned(value):
    """Make the same object with its fields, and those of the objects in it, in the opposite order and one field more."""
    if type(value) not in (*KINDS, Projection):
        return value
    fields = value._fields[::-1]
    kind = typing.NamedTuple("Turned", [("further", str), *((name, object) for name in fields)])
    for name, method in vars(type(value)).items():
        if callable(method) and not name.startswith("_"):
            setattr(kind, name, method)
    return kind(further="", **{name: turned(getattr(value, name)) for name in fields})


def problem(format, piece):
    torch.manual_seed(0)
    x, dout, index = torch.randn(T, H), torch.randn(T, H), torch.rand(T, E).topk(K).indices
    projections = {}
    for name, size_out, size_in in (("gate_up", 2 * I, H), ("down", H, I)):
        weight = torch.randn(E, size_out, size_in)
        if format:
            weight = PackedWeight.quantize(weight, format)
        adapter = LowRank(torch.randn(E, R, size_in), torch.randn(E, size_out, R), 0.5)
        projections[name] = projection(name, weight, torch.randn(E, size_out), adapter, False)
    options = Options(
        activation=Activation(),
        transposed=False,
        interleaved=False,
        backend="eager",
        saves=SaveFlags(h=not piece, u=True, v=True),
        keeps_expanded=bool(format),
        piece=piece,
    )
    rows = dispatch(index, T, E, backend="eager", piece=piece)
    return LayerCall(weight=torch.rand(T, K), x=x, rows=rows, options=options, **projections), dout


@pytest.mark.parametrize("piece", [0, 4])
@pytest.mark.parametrize("format", ["", "fp8"])
def test_the_order_and_number_of_fields_decide_nothing(format, piece):
    call, dout = problem(format, piece)
    needs = NEEDS if format else f"{NEEDS} gate_up_weight down_weight"
    out, *results = experts_op._experts_forward(call)
    call = call._replace(saved=call.options.saves.restore(results))
    other = turned(call)
    other_out, *other_results = experts_op._experts_forward(other)
    found = [other_out, *other.options.saves.restore(other_results)]
    assert all(same is kept or torch.equal(same, kept) for same, kept in zip(found, [out, *call.saved], strict=True))
    gradients = experts_op._experts_backward(dout, call, needs)
    assert all(map(torch.equal, gradients, experts_op._experts_backward(dout, other, needs)))
    assert len(gradients) == len(needs.split())


def test_what_may_have_a_gradient_are_the_names_of_tensors_of_a_call():
    assert all(torch.Tensor in (CALL.leaves[name], *typing.get_args(CALL.leaves[name])) for name in NEEDS.split())
    assert Saved._fields == SaveFlags._fields


def test_the_objects_are_made_by_names_alone():
    kinds = {kind.__name__ for kind in KINDS}
    for path in Path(calls.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                assert not node.args, f"{path.name}:{node.lineno} makes {node.func.id} by position"
