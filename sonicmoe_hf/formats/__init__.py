"""Frozen experts in 4 or 8 bits: an object for each format, and what loads, saves and shards them."""

from __future__ import annotations

from .format import Format, HubFormat
from .fp8 import FP8, HubFP8
from .mxfp4 import MXFP4, HubFP4
from .nf4 import NF4
from .nvfp4 import NVFP4, HubNVFP4

PACKED: dict[str, Format] = {format.name: format for format in (NF4(), MXFP4(), FP8(), NVFP4())}
# by the experts' format
HUB: dict[str, HubFormat] = {format.name: format for format in (HubFP8(), HubFP4(), HubNVFP4())}
