"""What a layer's attention should give: by the PyTorch reference, and in float64 from the pages' bytes. Knows nothing of any engine."""

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstrata.adapters.vllm import attention
from kvstrata.ops import dense, quant
from kvstrata.ops.table import PageTable, live_tokens
from tests.ops.kernel_cases import attention64, rotate64


@contextmanager
def reference() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTRATA_BACKEND", "torch")
        yield


def in_reference() -> bool:
    return os.environ.get("KVSTRATA_BACKEND") == "torch"


@contextmanager
def exactly() -> Iterator[list[Tensor]]:
    """What decode and extend should give in float64, in the order of the batch, of the calls that are made inside."""
    parts: list[Tensor] = []
    decode, extend = attention.decode, attention.extend

    def decoded(q: Tensor, arena: Tensor, table: PageTable, scale: float, **kwargs: Any) -> Any:
        parts.append(exact(q, q[:0], q[:0], None, arena, table, scale, kwargs["dense_dtype"]))
        return decode(q, arena, table, scale, **kwargs)

    def extended(q: Tensor, k: Tensor, v: Tensor, cu: list[int], arena: Tensor, table: PageTable, scale: float, **kwargs: Any) -> Any:
        parts.append(exact(q, k, v, cu, arena, table, scale, kwargs["dense_dtype"]))
        return extend(q, k, v, cu, arena, table, scale, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "decode", decoded)
        patch.setattr(attention, "extend", extended)
        yield parts


def exact(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int] | None, arena: Tensor, table: PageTable, scale: float,
          dense_dtype: torch.dtype) -> Tensor:  # fmt: skip
    """float64 [N, Hq, D]. Without cu_seqlens each query is a sequence that has nothing but pages."""
    h, d = arena.shape[1], q.shape[2]
    keys, values, live = [], [], []
    for s in table.segments:
        ids = s.frames[:, : int(s.counts.max())]
        frames = arena[ids.flatten(0, 1).long()]
        pair = quant.decode(frames, s.tier, d) if s.tier.k_planes else dense.from_frames(frames, d, dense_dtype)
        keys.append(pair[0].double().reshape(len(ids), -1, h, d))
        values.append(rotate64(pair[1].double()).reshape(len(ids), -1, h, d))
        live.append(live_tokens(s, h)[:, : ids.shape[1]].transpose(2, 3).reshape(len(ids), -1, h))
    out = []
    for b, (start, end) in enumerate(itertools.pairwise(cu_seqlens or range(len(q) + 1))):
        n = 0 if cu_seqlens is None else end - start
        seen = torch.ones(end - start, n, dtype=torch.bool, device=q.device).tril()[..., None].expand(-1, -1, h)
        mask = torch.cat([*(x[b].expand(end - start, -1, -1) for x in live), seen], 1)
        own = slice(start, start + n)
        own_k, own_v = (x[own] if cu_seqlens is not None else x.new_zeros(0, h, d) for x in (k, v))
        ks, vs = torch.cat([*(x[b] for x in keys), own_k.double()]), torch.cat([*(x[b] for x in values), own_v.double()])
        # what is dead need not be a number
        alive = mask.any(0)[..., None]
        out.append(attention64(q[start:end], torch.where(alive, ks, 0.0), torch.where(alive, vs, 0.0), mask, scale)[0])
    return torch.cat(out)


def error(out: Tensor, truth: Tensor) -> tuple[float, float]:
    """Of all of it, and of the worst row and head. NaN in `out` gives inf; where the truth is 0, so must be `out`."""
    off, norm = (x.double().norm(dim=-1) for x in (out.double() - truth.double(), truth))
    worst = torch.where(norm > 0, off / norm, off).nan_to_num(math.inf).max()
    return float((off.norm() / norm.norm().clamp_min(1e-30)).nan_to_num(math.inf)), float(worst)
