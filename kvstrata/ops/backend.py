"""Which implementation an op runs: the one place that looks for Triton and reads KVSTRATA_BACKEND. Knows nothing of the ops."""

import functools
import importlib.util
import os

from torch import Tensor

BACKENDS = ("auto", "triton", "torch")


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, so that they work on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(x: Tensor) -> bool:
    """Whether an op on `x` runs its Triton kernel. Raises ValueError for an unknown KVSTRATA_BACKEND or an impossible one."""
    backend = os.environ.get("KVSTRATA_BACKEND", "auto")
    if backend not in BACKENDS:
        raise ValueError(f"unknown KVSTRATA_BACKEND {backend!r}; accepted: {', '.join(BACKENDS)}")
    if backend == "triton" and not has_triton():
        raise ValueError("KVSTRATA_BACKEND is 'triton', but the package triton is not installed")
    if backend == "triton" and not x.is_cuda and not interpreting():
        raise ValueError(f"KVSTRATA_BACKEND is 'triton', but the tensors are on {x.device}; move them to a GPU or set TRITON_INTERPRET=1")
    return backend == "triton" or (backend == "auto" and x.is_cuda and has_triton())
