"""The backend in Triton: NVIDIA GPUs from sm_80 on, bf16, fp16 and fp32; the signatures are in ../interface.py.

fp32 products are three tf32 products (tf32x3: about fp32's accuracy, on tensor cores). Runs on a CPU under
TRITON_INTERPRET=1, for tests.
"""

from __future__ import annotations

import functools

import torch

from .bias_gradient import down_bias_gradient as _down_bias_gradient
from .bias_gradient import gate_up_bias_gradient as _gate_up_bias_gradient
from .combine import combine as combine
from .config import reads_packed as reads_packed
from .dequantize import dequantize as _dequantize
from .dispatch import dispatch as dispatch
from .dispatch import tile_table_length as tile_table_length
from .gemm_down import down as _down
from .gemm_down import scaled_down as _scaled_down
from .gemm_down import up_backward_input as _input_rows
from .gemm_down_backward import down_backward as _down_backward
from .gemm_down_backward import routing_gradient as routing_gradient
from .gemm_down_backward import scaled_down_backward as _scaled_down_backward
from .gemm_rank import lora_a_gradient as lora_a_gradient
from .gemm_rank import lora_b_backward as lora_b_backward
from .gemm_rank import lora_shrink as lora_shrink
from .gemm_up import scaled_up as _scaled_up
from .gemm_up import up as _up
from .gemm_wgrad import down_gradient as _down_gradient
from .gemm_wgrad import gate_up_gradient as _gate_up_gradient
from .reorder import reorder as reorder
from .rounding import round_rows as _round_rows
from .rounding_backward import round_rows_backward as _round_rows_backward
from .scale_rows import scale_rows as _scale_rows
from .scale_rows import transposed as _transposed


def _on_its_device(function):
    """Triton launches on the current device; a model spread over several GPUs runs layers on others. Functions that
    launch with a KernelLauncher alone need none of this. The first operand is a tensor, or a tuple of tensors."""

    @functools.wraps(function)
    def on_its_device(operand, *args, **kwargs):
        device = (operand[0] if isinstance(operand, tuple) else operand).get_device()
        if device < 0 or device == torch.cuda.current_device():
            return function(operand, *args, **kwargs)
        with torch.cuda.device(device):
            return function(operand, *args, **kwargs)

    return on_its_device


dequantize = _on_its_device(_dequantize)
round_rows = _on_its_device(_round_rows)
round_rows_backward = _on_its_device(_round_rows_backward)
up = _on_its_device(_up)
down = _on_its_device(_down)
down_backward = _on_its_device(_down_backward)
up_backward_input = _on_its_device(_input_rows)
scale_rows = _on_its_device(_scale_rows)
transposed = _on_its_device(_transposed)
scaled_up = _on_its_device(_scaled_up)
scaled_down = _on_its_device(_scaled_down)
scaled_down_backward = _on_its_device(_scaled_down_backward)
gate_up_gradient = _on_its_device(_gate_up_gradient)
down_gradient = _on_its_device(_down_gradient)
gate_up_bias_gradient = _on_its_device(_gate_up_bias_gradient)
down_bias_gradient = _on_its_device(_down_bias_gradient)
