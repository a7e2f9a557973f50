import os
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True, scope="session")
def _vllm_in_this_process():
    """Set the variables that vLLM reads when it is imported. It returns routed experts from its newer runner alone,
    whose bookkeeping is in Triton's kernels: interpreted here, where it looks for a backend for CPUs."""
    from triton.backends import backends

    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRITON_INTERPRET": "1",
    }
    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=bool)))
