"""Compiling CUDA C++ at run time: needs NVRTC, no GPU."""

import pytest
import torch

from kvstrata.ops import backend, cuda

SOURCE = 'extern "C" __global__ void f(int* a) { asm volatile("wgmma.fence.sync.aligned;"); a[0] = N; }'


def test_a_source_becomes_a_cubin_for_hopper():
    assert cuda.compile_source(SOURCE, ["-DN=3"])[:4] == b"\x7fELF"


def test_a_wrong_source_is_refused_with_the_compilers_log():
    with pytest.raises(cuda.CompileError, match='identifier "N" is undefined'):
        cuda.compile_source(SOURCE, [])


def test_cubins_are_kept_and_told_apart_by_options(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda, "source", lambda name: SOURCE)
    first, other = cuda.compiled("f", ["-DN=3"]), cuda.compiled("f", ["-DN=4"])
    assert first != other
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(cuda, "compile_source", lambda *_: pytest.fail("compiled again"))
    assert cuda.compiled("f", ["-DN=3"]) == first


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cuda, "source", lambda name: SOURCE)
    assert cuda.compiled("f", ["-DN=3"])[:4] == b"\x7fELF"


def test_a_number_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="4294967296"):
        cuda._argument(1 << 32)


def test_backend_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setenv("KVSTRATA_BACKEND", "cuda")
    with pytest.raises(ValueError, match="need a Hopper GPU"):
        backend.use_cuda(torch.zeros(1))
