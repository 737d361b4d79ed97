"""Which implementation an op runs: the one place that looks for kernels' compilers and reads KVSTRATA_BACKEND. Knows nothing of the ops."""

import functools
import importlib.util
import os

from torch import Tensor

from kvstrata.ops import cuda

BACKENDS = ("auto", "cuda", "triton", "torch")


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, so that they work on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _chosen() -> str:
    backend = os.environ.get("KVSTRATA_BACKEND", "auto")
    if backend not in BACKENDS:
        raise ValueError(f"unknown KVSTRATA_BACKEND {backend!r}; accepted: {', '.join(BACKENDS)}")
    return backend


def use_cuda(x: Tensor) -> bool:
    """Whether an op on `x` runs its CUDA C++ kernel, where it has one for the shape (else Triton's). Raises ValueError as `use_triton`."""
    backend = _chosen()
    if backend == "cuda" and not cuda.can_run(x):
        raise ValueError(f"KVSTRATA_BACKEND is 'cuda', but the tensors are on {x.device}; these kernels need a Hopper GPU and NVRTC")
    return backend in ("auto", "cuda") and cuda.can_run(x)


def use_triton(x: Tensor) -> bool:
    """Whether an op on `x` runs its Triton kernel. Raises ValueError for an unknown KVSTRATA_BACKEND or an impossible one."""
    backend = _chosen()
    if backend == "triton" and not has_triton():
        raise ValueError("KVSTRATA_BACKEND is 'triton', but the package triton is not installed")
    if backend == "triton" and not x.is_cuda and not interpreting():
        raise ValueError(f"KVSTRATA_BACKEND is 'triton', but the tensors are on {x.device}; move them to a GPU or set TRITON_INTERPRET=1")
    return backend == "triton" or (backend in ("auto", "cuda") and x.is_cuda and has_triton())
