"""Measurements of one layer: a step, its memory, its first call, and its errors against fp32."""

from __future__ import annotations

import time

import torch

from benchmarks.common.shapes import activated
from benchmarks.common.timing import release
from sonicmoe_hf.tools.comparing import relative_error

ADAPTERS = ("A1", "B1", "A2", "B2")


class LayerStep:
    """One contender's forward, or forward and backward, to be called again and again.

    Args:
        forward: () -> out, in [T, H].
        wanted: name -> what gets a gradient; none: forward alone.
        dout: the gradient of out.
        adapters: as PEFT stores them, by name; scale: what multiplies their products.
    """

    def __init__(self, forward, wanted: dict, dout, adapters: dict | None = None, scale: float = 0.0):
        self.run, self.wanted, self.dout = forward, wanted, dout
        self.adapters, self.scale, self.gradients = adapters or {}, scale, ()

    def forward(self):
        with torch.set_grad_enabled(bool(self.wanted)):
            return self.run()

    def __call__(self):
        out = self.forward()
        if self.wanted:  # the dense bound has no gradient of the routing weights
            self.gradients = torch.autograd.grad(out, list(self.wanted.values()), self.dout, allow_unused=True)
        return out

    def results(self) -> dict:
        """Run the step. Returns out, and each gradient under d and the name of its tensor."""
        out = self().detach()
        gradients, self.gradients = self.gradients, ()
        return {"out": out, **{f"d{name}": gradient for name, gradient in zip(self.wanted, gradients)}}


def measure_memory(step: LayerStep) -> dict[str, float]:
    """Measure MB that forward leaves for backward (its output not counted), and the most a step takes beyond its
    inputs."""
    release()
    before = torch.cuda.memory_allocated()
    out = step.forward()
    held = torch.cuda.memory_allocated() - before - out.nbytes
    del out
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    step.gradients = ()
    return {"held_MB": held / 1e6, "peak_MB": peak / 1e6}


def measure_first_step(step: LayerStep) -> dict[str, float]:
    """Measure seconds of a contender's first forward and backward at this size, what it compiles, loads and tunes
    included, and the most memory that took beyond its inputs, in MB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    step.gradients = ()
    return {"first_step_s": seconds, "first_peak_MB": (torch.cuda.max_memory_allocated() - before) / 1e6}


def largest_error(results, expected) -> float:
    """Compute the largest relative error of tensors in the same order."""
    return max(relative_error(result, exact) for result, exact in zip(results, expected, strict=True))


def factors_of_expert(adapters, e, num_experts):
    """Select expert e's adapters in fp32, by name: A as [r, in], B as [out, r]. `adapters` are as PEFT stores them."""
    factors = {}
    for name in ADAPTERS:
        if name in adapters:
            factor = adapters[name].detach().float()
            factors[name] = factor.unflatten(0, (num_experts, -1))[e] if name[0] == "A" else factor[:, e::num_experts]
    return factors


def relative_errors(step, inputs, activation="swiglu"):
    """Compute the error of every result of a layer against fp32, relative to its norm; an expert at a time, because all
    weights and their gradients in fp32 would not fit.

    step.results() gives out, dx, dweight and the gradients of what was trained, by name: dgate_up, ddown, or of adapters
    dA1, dB1, dA2, dB2; step.adapters are these, by name, and step.scale what multiplies their product.
    """
    x, gate_up, down, expert, weight, dout = (tensor.detach() for tensor in inputs)
    num_experts, results = len(gate_up), step.results()
    expected = {name: torch.zeros_like(results[name], dtype=torch.float32) for name in ("out", "dx", "dweight")}
    squares = {name: [0.0, 0.0] for name in results if name not in expected}
    for e in range(num_experts):
        own = factors_of_expert(step.adapters, e, num_experts)
        w1, w2 = gate_up[e].float(), down[e].float()
        if own:
            w1, w2 = w1 + step.scale * own["B1"] @ own["A1"], w2 + step.scale * own["B2"] @ own["A2"]
        token, slot = (expert == e).nonzero(as_tuple=True)
        x_e, dout_e, w = x[token].float(), dout[token].float(), weight[token, slot].float()[:, None]
        with torch.enable_grad():
            h = (x_e @ w1.T).requires_grad_()
            value = activated(h, activation)
        da = dout_e @ w2
        (dh,) = torch.autograd.grad(value, h, w * da)
        a = value.detach()
        expected["out"].index_add_(0, token, w * (a @ w2.T))
        expected["dweight"][token, slot] = (da * a).sum(1)
        expected["dx"].index_add_(0, token, dh @ w1)
        dw1, dw2 = dh.T @ x_e, (w * dout_e).T @ a
        exact = {"dgate_up": dw1, "ddown": dw2}
        for number, dw in (("1", dw1), ("2", dw2)) if own else ():
            exact[f"dA{number}"] = step.scale * own[f"B{number}"].T @ dw
            exact[f"dB{number}"] = step.scale * dw @ own[f"A{number}"].T
        gradients = factors_of_expert({name[1:]: results[name] for name in squares}, e, num_experts)
        for name, sums in squares.items():
            gradient = gradients[name[1:]] if name[1:] in gradients else results[name][e].float()
            sums[0] += (gradient - exact[name]).square().sum()
            sums[1] += exact[name].square().sum()
    errors = {name: relative_error(results[name], exact) for name, exact in expected.items()}
    return errors | {name: (wrong / whole).sqrt().item() for name, (wrong, whole) in squares.items()}
