"""Registers our implementation with Transformers, where it takes some: `EPImplementationInterface` came with 5.23.

Imported when Transformers' module is (registration.py), while Transformers itself still may be.
"""

from __future__ import annotations

from transformers.distributed import expert_parallel

if hasattr(expert_parallel, "EPImplementationInterface"):  # 5.22 has the module without it
    from . import implementation as implementation
