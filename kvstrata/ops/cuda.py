"""CUDA C++ of this package compiled at run time (NVRTC) and launched on the current stream. Knows nothing of what a kernel does.

Sources lie beside this file, include nothing but one another and are compiled for sm_90a, so a toolkit is not needed: NVRTC comes with
torch. A compiled kernel is kept under KVSTRATA_CACHE (default ~/.cache/kvstrata), named by a hash of source, options and compiler.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

ARCH = "sm_90a"
"""Hopper, with its own instructions (wgmma, setmaxnreg)."""
_SHARED_LIMIT_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CompileError(RuntimeError):
    """NVRTC refused a source; the message is its log."""


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """The compiler: by name where torch has made it known, else from the folder of the package nvidia-cuda-nvrtc."""
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    for path in sorted((Path(sysconfig.get_paths()["purelib"]) / "nvidia").glob("*/lib/libnvrtc.so.*")):
        # it looks for its second half by name, which is found where it is loaded already
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path))
    return None


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def can_compile() -> bool:
    """Whether NVRTC is there. Compiling needs no GPU."""
    return _nvrtc() is not None


def can_run(x: Tensor) -> bool:
    """Whether these kernels run where x lies: a Hopper GPU, NVRTC and the driver."""
    return x.is_cuda and _capability(x.device.index or 0) == (9, 0) and can_compile() and _driver() is not None


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def source(name: str) -> str:
    """Text of NAME.cu beside this file, with its `#include "OTHER.cuh"` lines replaced by those files."""
    folder = Path(__file__).parent
    text = (folder / f"{name}.cu").read_text(encoding="utf-8")
    return re.sub(r'^#include "(\w+\.cuh)"$', lambda m: (folder / m[1]).read_text(encoding="utf-8"), text, flags=re.MULTILINE)


def compile_source(text: str, options: Sequence[str]) -> bytes:
    """CUDA C++ -> cubin for ARCH. Raises CompileError with the compiler's log."""
    nvrtc = _nvrtc()
    if nvrtc is None:
        raise CompileError("NVRTC was not found; it comes with CUDA builds of torch, or as the package nvidia-cuda-nvrtc")
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kvstrata.cu", 0, None, None)
    arguments = [o.encode() for o in (f"--gpu-architecture={ARCH}", "--std=c++17", *options)]
    size = ctypes.c_size_t()
    try:
        if nvrtc.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(log.value.decode(errors="replace"))
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _version() -> str:
    nvrtc = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    if nvrtc is not None:
        nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compiled(name: str, options: Sequence[str]) -> bytes:
    """Cubin of source NAME with these options, from the cache if it is there."""
    text = source(name)
    key = hashlib.sha256("\0".join([text, ARCH, _version(), *options]).encode()).hexdigest()[:32]
    folder = Path(os.environ.get("KVSTRATA_CACHE") or Path.home() / ".cache" / "kvstrata")
    path = folder / f"{name}-{key}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    cubin = compile_source(text, options)
    # a cache that cannot be written costs time, nothing else
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(cubin)
        Path(file.name).replace(path)
    return cubin


def readable(x: Tensor) -> Tensor:
    """x itself where a kernel can read its rows 16 bytes at a time and its strides in bytes are int32, else a copy."""
    strides = [s * x.element_size() for s in x.stride()[:-1]]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % 16 == 0 and s < 1 << 31 for s in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class Kernel:
    """One compiled kernel on the device that is current when it is made. `shared_bytes`: dynamic shared memory of a block."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        self._cubin, self.shared_bytes, self._device = cubin, shared_bytes, torch.cuda.current_device()
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver_or_raise().cuModuleLoadData(ctypes.byref(module), cubin))
        _check(_driver_or_raise().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        if shared_bytes > 48 << 10:
            _check(_driver_or_raise().cuFuncSetAttribute(self._function, _SHARED_LIMIT_ATTRIBUTE, shared_bytes))

    def __call__(self, grid: tuple[int, ...], threads: int, arguments: Sequence[Tensor | int | float]) -> None:
        """Launch on its device's current stream. Tensors go as pointers, int as int32 (ValueError where it does not fit) and float."""
        values = [_argument(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        x, y, z = (*grid, 1, 1)[:3]
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            _check(_driver_or_raise().cuLaunchKernel(self._function, x, y, z, threads, 1, 1, self.shared_bytes, stream, pointers, None))


def _argument(a: Tensor | int | float) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if isinstance(a, Tensor):
        return ctypes.c_void_p(a.data_ptr())
    if isinstance(a, float):
        return ctypes.c_float(a)
    if not -(2**31) <= a < 2**31:
        raise ValueError(f"argument {a} of a kernel does not fit in 32 bits")
    return ctypes.c_int(a)


def _driver_or_raise() -> ctypes.CDLL:
    driver = _driver()
    if driver is None:
        raise RuntimeError("libcuda.so.1 was not found: there is no NVIDIA driver here")
    return driver


def _check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver_or_raise().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {text.value.decode() if text.value else code}")


@functools.cache
def kernel(name: str, function: str, options: tuple[str, ...] = (), shared_bytes: int = 0, device: int = 0) -> Kernel:
    """`function` (extern "C") of source NAME compiled with `options` ("-DD=128", ...), loaded on `device`. Raises CompileError."""
    with torch.cuda.device(device):
        torch.empty(1, device="cuda")  # the context exists from here on
        return Kernel(compiled(name, options), function, shared_bytes)
