"""The backend in Triton: NVIDIA GPUs from sm_80 on, bf16, fp16 and fp32; the signatures are in ../interface.py.

fp32 products are three tf32 products (tf32x3: about fp32's accuracy, on tensor cores). Runs on a CPU under
TRITON_INTERPRET=1, for tests.
"""

from __future__ import annotations

from .bias_gradient import down_bias_gradient as down_bias_gradient
from .bias_gradient import gate_up_bias_gradient as gate_up_bias_gradient
from .combine import combine as combine
from .config import decodes as decodes
from .config import reads_packed as reads_packed
from .dequantize import dequantize as dequantize
from .dispatch import dispatch as dispatch
from .gemm_down import down as down
from .gemm_down import scaled_down as scaled_down
from .gemm_down import up_backward_input as up_backward_input
from .gemm_down_backward import down_backward as down_backward
from .gemm_down_backward import routing_gradient as routing_gradient
from .gemm_down_backward import scaled_down_backward as scaled_down_backward
from .gemm_rank import lora_a_gradient as lora_a_gradient
from .gemm_rank import lora_shrink as lora_shrink
from .gemm_rank_backward import lora_b_backward as lora_b_backward
from .gemm_up import scaled_up as scaled_up
from .gemm_up import up as up
from .gemm_wgrad import down_gradient as down_gradient
from .gemm_wgrad import gate_up_gradient as gate_up_gradient
from .reorder import reorder as reorder
from .rounding import round_rows as round_rows
from .rounding_backward import round_rows_backward as round_rows_backward
from .scale_rows import scale_rows as scale_rows
from .scale_rows import transposed as transposed
from .tile_table import tile_table_length as tile_table_length
