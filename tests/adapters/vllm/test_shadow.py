"""What the shadow of an engine's attention finds: nothing where the kernels are the reference, and each error that is planted beside it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstrata.adapters.vllm import attention
from kvstrata.adapters.vllm.settings import EngineSettings
from kvstrata.types import Tier

from .exact import in_reference
from .shadow import Shadow
from .steps import Engine, Request

T = Tier
TIERS = [T.BF16, T.INT2, T.INT4, T.INT3, T.INT8, T.INT2, T.INT4]
GROUP = 64


class Graph:
    """What stands in for a CUDA graph here: steps of decoding are recorded as one would be captured, and so run once."""

    def __init__(self) -> None:
        self.capturing = False

    def __call__(self) -> bool:
        return self.capturing


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def shadow(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> Shadow:
    return Shadow(monkeypatch, graph)


def run(shadow: Shadow, graph: Graph, dtype: str = "bfloat16") -> None:
    """Chunks, chunks on pages, decoding in turns with and without a graph, pages that settle in a chunk and out of the ring."""
    engine = Engine(EngineSettings(policy="uniform", window=GROUP, dense_dtype=dtype), num_frames=300)
    a, b, c = (Request.random(x, n, TIERS, seed=i) for i, (x, n) in enumerate([("a", 197), ("b", 131), ("c", 125)]))
    engine.step([(a, 188)])
    engine.step([(a, 1), (b, 70)])
    engine.step([(a, 1), (b, 57), (c, 120)])
    while running := [r for r in (a, b, c) if r.computed < len(r.q)]:
        graph.capturing = a.computed % 2 == 1
        engine.step([(r, 1) for r in running])
        graph.capturing = False
        shadow.after_step()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_reference_is_its_own_shadow(shadow: Shadow, graph: Graph, dtype: str) -> None:
    run(shadow, graph, dtype)
    assert not shadow.wrong, shadow.report()
    calls = shadow.seen.calls
    assert min(calls[x] for x in ("chunk", "decode and chunk", "decode", "replay", "chunk on pages", "settle")) > 0 and calls["replay"] > 2
    assert shadow.seen.tiers == {T.BF16, T.INT2, T.INT4, T.INT3, T.INT8} and shadow.seen.most_shares > 1
    assert shadow.seen.values > 0 and shadow.seen.moved == 0
    # float32 arithmetic against float64's
    assert max(shadow.seen.errors.values()) < 1e-5


def other_frame(call: Callable[..., Any], q: Tensor, arena: Tensor, table: Any, *args: Any, **kwargs: Any) -> Any:
    """Planes of INT4's pages change places."""
    segments = tuple(replace(s, frames=s.frames.roll(1, 2)) if s.tier is T.INT4 else s for s in table.segments)
    return call(q, arena, replace(table, segments=segments), *args, **kwargs)


def fewer_pages(call: Callable[..., Any], q: Tensor, arena: Tensor, table: Any, *args: Any, **kwargs: Any) -> Any:
    segments = tuple(replace(s, counts=(s.counts - 1).clamp_min(0)) if s.tier is T.INT2 else s for s in table.segments)
    return call(q, arena, replace(table, segments=segments), *args, **kwargs)


def one_token_more(call: Callable[..., Any], q: Tensor, arena: Tensor, table: Any, *args: Any, **kwargs: Any) -> Any:
    segments = tuple(s if s.live is None else replace(s, live=s.live << 1 | 1) for s in table.segments)
    return call(q, arena, replace(table, segments=segments), *args, **kwargs)


def rescaled(call: Callable[..., Any], q: Tensor, arena: Tensor, table: Any, scale: float, **kwargs: Any) -> Any:
    return call(q, arena, table, 1.05 * scale, **kwargs)


def unrotated(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs | {"rotated": False})


def no_last_row(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out, lse = call(*args, **kwargs)
    kwargs["out"][-1] = torch.nan
    return out, lse


def of_chunk(change: Callable[..., Any]) -> Callable[..., Any]:
    """The same change of `extend`, whose arguments are others."""

    def changed(call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, cu: list[int], arena: Tensor, table: Any, *args: Any,
                **kwargs: Any) -> Any:  # fmt: skip
        return change(lambda q, arena, table, *a, **kw: call(q, k, v, cu, arena, table, *a, **kw), q, arena, table, *args, **kwargs)

    return changed


def next_place(call: Callable[..., Any], arena: Tensor, frames: Tensor, tokens: Tensor, *args: Any, **kwargs: Any) -> None:
    call(arena, frames, (tokens + 1) % 32, *args, **kwargs)


def plain_v(call: Callable[..., Any], arena: Tensor, frames: Tensor, tokens: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> None:
    call(arena, frames, tokens, k, k, **kwargs)


def one_bit(call: Callable[..., Any], arena: Tensor, first: Tensor, second: Tensor, *args: Any) -> None:
    """of a page's codes."""
    call(arena, first, second, *args)
    frames = second if second.dtype is torch.int32 else first
    arena[frames[-1, -1].long(), -1, 5] ^= 4


PLANTED = [
    ("decode", other_frame), ("decode", fewer_pages), ("decode", one_token_more), ("decode", rescaled), ("decode", unrotated),
    ("decode", no_last_row), ("extend", of_chunk(other_frame)), ("extend", of_chunk(fewer_pages)), ("extend", of_chunk(rescaled)),
    ("write_dense", next_place), ("write_dense", plain_v), ("write_pages", one_bit), ("settle_pages", one_bit),
]  # fmt: skip


@pytest.mark.parametrize("op, change", PLANTED, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_planted_error_is_found(
    op: str, change: Callable[..., Any], shadow: Shadow, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = getattr(attention, op)

    def planted(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if in_reference() else change(call, *args, **kwargs)

    monkeypatch.setattr(attention, op, planted)
    run(shadow, graph)
    assert shadow.wrong


@pytest.mark.parametrize("op, change", [p for p in PLANTED if p[0] in ("decode", "write_dense")])
def test_an_error_of_a_graph_alone_is_found(
    op: str, change: Callable[..., Any], shadow: Shadow, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = getattr(attention, op)
    monkeypatch.setattr(attention, op, lambda *args, **kwargs: change(call, *args, **kwargs) if graph() else call(*args, **kwargs))
    run(shadow, graph)
    assert any("replay" in line for line in shadow.wrong) and any("bits" in line for line in shadow.wrong)
    assert all("replay" in line or "bits" in line for line in shadow.wrong), shadow.report()
