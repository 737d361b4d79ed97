"""The CUDA C++ decode kernel without a GPU: every variant compiles, and neither spills nor takes more than its share of a chip."""

import functools
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from kvstrata.ops import backend, decode, decode_cuda, quant
from kvstrata.ops.decode_cuda import BLOCKS, DTYPES, HEAD_DIMS, WARPS
from kvstrata.types import Tier
from tests.ops.cubin import inspect
from tests.ops.kernel_cases import make_case

REGISTERS, SHARED, RESERVED = 65536, 228 << 10, 1 << 10
"""Of a multiprocessor; the last: bytes of shared memory that a block takes beyond what it asks for."""


def usage(variant):
    """Registers and bytes of stack of a compiled variant. A spilled register lies on the stack."""
    (out,) = inspect("decode", decode_cuda.options(*variant), "-res-usage")
    return tuple(int(re.search(rf"{name}:(\d+)", out)[1]) for name in ("REG", "STACK"))


def test_every_variant_compiles_without_spills():
    variants = list(product(HEAD_DIMS, DTYPES))
    # the compiler runs outside of Python's lock
    with ThreadPoolExecutor(4) as pool:
        for variant, (registers, stack) in zip(variants, pool.map(usage, variants), strict=True):
            # they are handed out eight at a time
            assert -(-registers // 8) * 8 * 32 * WARPS * BLOCKS <= REGISTERS, variant
            assert stack == 0, variant


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_copies_with_a_cache_policy_have_plain_addresses(head_dim):
    """NVRTC 13.0 gives an illegal instruction where the address in shared memory is a register and a uniform register together."""
    (sass,) = inspect("decode", decode_cuda.options(head_dim, torch.bfloat16), "-sass")
    addresses = re.findall(r"LDGSTS\S* \[(.*?)\]", sass)
    assert len(addresses) > 50
    assert not [a for a in addresses if "UR" in a]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_as_many_blocks_fit_as_the_grid_counts_on(head_dim):
    assert BLOCKS * (decode_cuda.shared_bytes(head_dim) + RESERVED) <= SHARED


def test_the_kernel_is_given_its_shapes_only(monkeypatch):
    case = make_case({Tier.INT2: [1]}, 1, 64)
    monkeypatch.setattr(backend, "use_cuda", lambda q: True)
    monkeypatch.setattr(backend, "use_triton", lambda q: False)
    monkeypatch.setattr(decode_cuda, "decode_cuda", lambda *args, **kwargs: "kernel")
    run = functools.partial(decode.decode, arena=case.arena, table=case.table, scale=0.1, dense_dtype=torch.float16)
    assert run(torch.zeros(1, 8, 64, dtype=torch.float16)) == "kernel"
    assert run(torch.zeros(1, 9, 64, dtype=torch.float16)) != "kernel"
    assert run(torch.zeros(1, 8, 64)) != "kernel"
    assert run(torch.zeros(1, 8, 64, dtype=torch.float16), decode_pages=lambda *args: quant.decode(*args)) != "kernel"
