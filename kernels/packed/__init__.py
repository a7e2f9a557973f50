"""Experts' weights in 4 or 8 bits: a class for each format, in plain PyTorch on any device."""

from __future__ import annotations

from .format import FORMATS as FORMATS
from .format import ORDERS as ORDERS
from .format import Format as Format
from .format import Quantized as Quantized
from .fp8 import FP8
from .int4 import Int4
from .mxfp4 import MXFP4
from .nf4 import NF4
from .nvfp4 import NVFP4

FORMATS.update({format.name: format for format in (NF4(), MXFP4(), FP8(), NVFP4(), Int4(False), Int4(True))})
