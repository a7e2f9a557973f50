"""Bad input to moe_experts: the error names the value and the remedy."""

import pytest
import torch

from sonicmoe_hf.layer import backends
from sonicmoe_hf.layer.moe_experts import Activation, moe_experts
from sonicmoe_hf.layer.routing import Routing


def good(**changes):
    inputs = {
        "x": torch.randn(5, 6),
        "gate_up": torch.randn(4, 8, 6),
        "down": torch.randn(4, 6, 4),
        "routing": (torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2)),
    }
    inputs.update(changes)
    return [inputs.pop(name) for name in ("x", "gate_up", "down", "routing")], inputs


BAD = {
    "hidden sizes differ": ({"x": torch.randn(5, 7)}, r"x \(5, 7\), gate_up \(4, 8, 6\).*is the layout right\?"),
    "an odd number of gate and up rows": ({"gate_up": torch.randn(4, 7, 6)}, r"read as \[T, H\]"),
    "down does not fit": ({"down": torch.randn(4, 4, 6)}, r"down \(4, 4, 6\)"),
    "as many experts in both": ({"down": torch.randn(3, 6, 4)}, r"disagree"),
    "the wrong layout": ({"layout": "transposed_interleaved"}, r"layout='transposed_interleaved'"),
    "an order of gates for an activation without one": (
        {"layout": "interleaved", "activation": "relu2"},
        r"'relu2' has no gate, so layout='interleaved' .* use layout='concatenated'",
    ),
    "the native order for an activation without a gate": (
        {"layout": "transposed_interleaved", "activation": "relu2"},
        r"'relu2' has no gate, so layout='transposed_interleaved' .* use layout='concatenated'",
    ),
    "gates for an activation without one": (
        {"activation": "relu2"},
        r"\[E, I, H\] .* with activation='relu2', disagree",
    ),
    "no gates for an activation with one": (
        {"gate_up": torch.randn(4, 4, 6)},
        r"\[E, 2I, H\] .* with activation='swiglu', disagree",
    ),
    "three dimensions": ({"x": torch.randn(1, 5, 6)}, r"x \(1, 5, 6\), .* disagree"),
    "an unknown layout": ({"layout": "packed"}, r"layout is 'packed'; choose one of 'concatenated', 'interleaved'"),
    "an unknown activation": ({"activation": "mish"}, r"activation is 'mish'; choose one of 'swiglu', 'geglu'"),
    "an unknown activation object": ({"activation": Activation("tanh")}, r"activation is 'tanh'"),
    "an unknown save policy": ({"save": "all"}, r"save is 'all'; choose one of 'preactivation', 'input'"),
    "an unknown backend": ({"backend": "cuda"}, r"backend is 'cuda'; choose one of .*'eager'"),
    "integers": (
        {"x": torch.zeros(5, 6, dtype=torch.int32)},
        r"gate_up has dtype torch.float32 but x has torch.int32",
    ),
    "dtypes differ": (
        {"down": torch.randn(4, 6, 4).double()},
        r"down has dtype torch.float64 but x has torch.float32; cast",
    ),
    "a bias of another dtype": (
        {"down_bias": torch.zeros(4, 6, dtype=torch.float16)},
        r"down_bias has dtype torch.float16",
    ),
    "a bias of the wrong shape": (
        {"gate_up_bias": torch.zeros(4, 4)},
        r"gate_up_bias has shape \(4, 4\); it must be \(4, 8\)",
    ),
    "devices differ": ({"gate_up": torch.empty(4, 8, 6, device="meta")}, r"gate_up is on meta but x is on cpu; move"),
    "the routing is elsewhere": (
        {"routing": (torch.zeros(5, 2, dtype=torch.long, device="meta"), torch.ones(5, 2, device="meta"))},
        r"the routing is on meta but x is on cpu",
    ),
    "an expert that is not there": (
        {"routing": (torch.full((5, 2), 4), torch.ones(5, 2))},
        r"names expert 4, but there are 4 experts",
    ),
    "weights of another shape": (
        {"routing": (torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 3))},
        r"weights have shape \(5, 3\)",
    ),
    "routing of other tokens": (
        {"routing": (torch.zeros(6, 2, dtype=torch.long), torch.ones(6, 2))},
        r"must be \[T, K\] with T = 5 tokens",
    ),
    "float indices": ({"routing": (torch.zeros(5, 2), torch.ones(5, 2))}, r"expert ids are integers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_an_error_that_names_it(case):
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        arguments, options = good(**changes)
        moe_experts(*arguments, **options)


def test_the_good_input_that_the_bad_ones_change_is_good():
    arguments, options = good()
    assert moe_experts(*arguments, **options).shape == (5, 6)
    arguments, options = good(routing=Routing(torch.full((5, 2), 4), torch.ones(5, 2), sentinels=True))
    assert (moe_experts(*arguments, **options) == 0).all()


def test_the_environment_names_a_backend_or_is_refused(monkeypatch):
    monkeypatch.setenv("SONICMOE_HF_BACKEND", "eager")
    assert backends.choose(torch.device("cpu"), torch.float32) == ("eager", "asked for by SONICMOE_HF_BACKEND")
    monkeypatch.setenv("SONICMOE_HF_BACKEND", "fast")
    with pytest.raises(ValueError, match=r"SONICMOE_HF_BACKEND is 'fast'; choose one of .*'eager'"):
        backends.choose(torch.device("cpu"), torch.float32)
