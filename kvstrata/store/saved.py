"""A sequence as a document and tensors, and back into a store: planes as they lie, and all that its next steps depend on.

Knows nothing of files, models or policies.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.ops import dense
from kvstrata.ops.score import NUM_QUERIES
from kvstrata.store.arena import OutOfFramesError
from kvstrata.store.contents import tokens_of
from kvstrata.store.gathered import EMPTY, Gathered
from kvstrata.store.memory import QueryMemory
from kvstrata.store.page import FULL, Page, Sequence
from kvstrata.store.plain import parsed, plain
from kvstrata.store.prefix import page_key
from kvstrata.store.queries import NONE
from kvstrata.store.store import Store
from kvstrata.store.verified import Tensors
from kvstrata.types import PAGE_SIZE, Plan, Tier


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a sequence is no tensor. pages: tier and live tokens of each; anchors, survivors: tier of each of these pages."""

    plan: Plan
    pages: tuple[tuple[Tier, int], ...]
    anchors: tuple[Tier, ...]
    survivors: tuple[Tier, ...]
    settled: int
    keys: tuple[bytes, ...]
    salted: bool
    """Whether something was evicted: what is computed from then on serves nobody else."""
    shareable: bool
    chosen_at: int
    weighed_at: int
    has_ring: bool
    queries_from: int
    memory_positions: tuple[int, ...]
    memory_turns: tuple[int, ...]
    memory_until: int
    told_by: bytes
    scale: float
    thinned: int
    peak_frames: int
    peak_tokens: int
    demoted_pages: int
    evicted_pages: int


@dataclass(frozen=True, slots=True, eq=False)
class Unplaced:
    """A sequence that was read and found right, but has no frames yet."""

    facts: Facts
    tensors: Tensors

    @property
    def frames(self) -> int:
        return self.tensors["planes"].shape[1]


def pack(store: Store, s: Sequence) -> tuple[dict[str, Any], Tensors]:
    """A sequence of no open step. Its document, and its tensors on the CPU."""
    facts = Facts(
        s.plan, tuple((page.tier, page.live) for page in s.pages), tuple(page.tier for page in s.anchors),
        tuple(page.tier for page in s.survivors), s.settled, tuple(s.keys), bool(s.salt), s.shareable, s.chosen_at, s.weighed_at,
        s.ring != NONE, s.queries_from, s.memory.positions, s.memory.turns, s.memory.until, s.told_by, s.scale, s.thinned, s.peak_frames,
        s.peak_tokens, s.demoted_pages, s.evicted_pages,
    )  # fmt: skip
    tensors = {
        "token_ids": torch.tensor(s.token_ids, dtype=torch.int64), "planes": _planes(store, s), "weights": torch.from_numpy(s.weights),
        "received": s.received, "worth": s.worth, "memory": s.memory.queries,
    }  # fmt: skip
    first = _first_query(s.num_tokens, s.queries_from)
    if store.queries.holds(s.ring) and first < s.num_tokens:
        tensors["queries"], tensors["queries.scales"] = store.queries.packed(s.ring, first, s.num_tokens)
    for name, pages in (("anchors", s.anchors), ("survivors", s.survivors)):
        if pages:
            tensors[f"{name}.positions"] = torch.from_numpy(np.stack([page.positions for page in pages]))
            tensors[f"{name}.whole"] = torch.from_numpy(np.stack([page.whole for page in pages]))
    return plain(facts), {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items() if x is not None}


def _planes(store: Store, s: Sequence) -> Tensor:
    """Frames of all pages, uint8 [layers, frames, KV heads, bytes]. Dense rows of no living token are zeros: what a conversation forgot
    may lie there."""
    at = torch.tensor([i for frames in s.held for i in frames], dtype=torch.int64, device=store.arena.buffer.device)
    planes, start = store.arena.buffer[:, at].cpu(), 0
    for page in s.pages:
        end = start + len(page.frames)
        if page.tier is Tier.BF16 and page.live != FULL:
            dead = torch.from_numpy(~tokens_of([page.live])[0])
            k, v = (x.clone() for x in dense.from_frames(planes[:, start:end], store.config.head_dim, store.dense_dtype))
            k[:, dead], v[:, dead] = 0, 0
            planes[:, start:end] = dense.to_frames(k, v, planes.shape[-1])
        start = end
    return planes


def _first_query(num_tokens: int, queries_from: int) -> int:
    return max(queries_from, num_tokens - NUM_QUERIES)


def unpack(store: Store, document: dict[str, Any], tensors: Tensors) -> Unplaced:
    """What `pack` made, for a store of the same geometry. Raises ValueError where it fits neither the store nor itself, OutOfFramesError
    where the store has no room for it. Changes nothing."""
    facts, c, layout = parsed(Facts, document), store.config, store.layout
    held = [tier for tier, _ in facts.pages] + [*facts.anchors, *facts.survivors]
    frames = sum(layout.frames(layout.check_tier(tier)) for tier in held)
    store.check_plan(facts.plan)
    _check(tensors, "token_ids", torch.int64, (None,))
    n, heads = len(tensors["token_ids"]), (c.num_layers, c.num_kv_heads)
    if len(facts.pages) != -(-n // PAGE_SIZE) or not len(facts.keys) <= facts.settled <= len(facts.pages):
        raise ValueError(f"{len(facts.pages)} pages, {facts.settled} settled and {len(facts.keys)} with keys, do not make {n} tokens")
    _check(tensors, "planes", torch.uint8, (c.num_layers, frames, c.num_kv_heads, layout.head_frame_bytes))
    _check(tensors, "weights", torch.float64, (None,))
    for name, tiers in (("anchors", facts.anchors), ("survivors", facts.survivors)):
        if tiers:
            _check(tensors, f"{name}.positions", torch.int32, (len(tiers), *heads, PAGE_SIZE))
            _check(tensors, f"{name}.whole", torch.bool, (len(tiers), *heads, PAGE_SIZE))
            positions = tensors[f"{name}.positions"]
            if positions.min() < EMPTY or positions.max() >= n:
                raise ValueError(f"{name} are at positions {int(positions.min())} to {int(positions.max())} of {n} tokens")
    needed = {"memory"} if facts.memory_positions else set()
    newest = n - _first_query(n, facts.queries_from)
    for name, dtype, shape in (
        ("received", torch.float32, (*heads, None)), ("worth", torch.float16, (*heads, None)),
        ("memory", store.dense_dtype, (len(facts.memory_positions), c.num_layers, None, c.head_dim)),
    ):  # fmt: skip
        if name in tensors or name in needed:
            _check(tensors, name, dtype, shape)
    if "queries" in tensors or (facts.has_ring and newest > 0):
        _check(tensors, "queries", torch.int8, (c.num_layers, newest, store.queries.num_heads, c.head_dim))
        _check(tensors, "queries.scales", torch.float32, tuple(tensors["queries"].shape[:3]))
    room = store.arena.free + store.prefix.reclaimable()
    if frames > room:
        raise OutOfFramesError(frames, room, store.holders())
    return Unplaced(facts, tensors)


def _check(tensors: Tensors, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Raise ValueError unless there is such a tensor; None: any size."""
    if name not in tensors:
        raise ValueError(f"{name} is missing")
    x = tensors[name]
    if x.dtype is not dtype or x.ndim != len(shape) or any(want not in (None, has) for want, has in zip(shape, x.shape, strict=True)):
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; accepted: {dtype} {['any' if n is None else n for n in shape]}")


def place(store: Store, unplaced: Unplaced) -> int:
    """Give the sequence frames and make it one of the store's; its id. Its settled pages are offered to others, as they were.
    Raises OutOfFramesError, and changes nothing, where there are too few."""
    facts, tensors, device = unplaced.facts, unplaced.tensors, store.arena.buffer.device
    frames = store.allocate(unplaced.frames)
    try:
        store.arena.buffer[:, torch.tensor(frames, dtype=torch.int64, device=device)] = tensors["planes"].to(device)
        s = store.sequence(store.add_sequence(facts.plan))
    except BaseException:
        store.arena.release(frames)
        raise
    ids = iter(frames)

    def of(tier: Tier) -> tuple[int, ...]:
        return tuple(itertools.islice(ids, store.layout.frames(tier)))

    s.token_ids = tensors["token_ids"].tolist()
    s.pages = [Page(tier, of(tier), live) for tier, live in facts.pages]
    for pages, tiers, name in ((s.anchors, facts.anchors, "anchors"), (s.survivors, facts.survivors, "survivors")):
        for i, tier in enumerate(tiers):
            positions, whole = (_copy(tensors[f"{name}.{what}"][i]) for what in ("positions", "whole"))
            pages.append(Gathered(tier, of(tier), positions, whole))
    s.told_by = facts.told_by
    s.settled, s.keys, s.shareable, s.scale = facts.settled, list(facts.keys), facts.shareable, facts.scale
    s.chosen_at, s.weighed_at, s.thinned = facts.chosen_at, facts.weighed_at, facts.thinned
    s.peak_frames, s.peak_tokens = facts.peak_frames, facts.peak_tokens
    s.demoted_pages, s.evicted_pages = facts.demoted_pages, facts.evicted_pages
    s.weights = _copy(tensors["weights"])
    s.received, s.worth, memory = (tensors[k].to(device) if k in tensors else None for k in ("received", "worth", "memory"))
    s.memory = QueryMemory(facts.memory_positions, facts.memory_turns, memory, facts.memory_until)
    _restore_queries(store, s, facts, tensors)
    if facts.salted:
        # a salt is of one store: another's could be some neighbour's there
        store.new_epoch(s)
    _offer(store, s)
    return s.id


def _copy(x: Tensor) -> NDArray[Any]:
    return x.numpy().copy()


def _restore_queries(store: Store, s: Sequence, facts: Facts, tensors: Tensors) -> None:
    s.queries_from = facts.queries_from
    if not facts.has_ring:
        return
    s.ring = store.queries.take()
    first = _first_query(s.num_tokens, s.queries_from)
    if first < s.num_tokens:
        store.queries.restore(s.ring, first, tensors["queries"], tensors["queries.scales"])


def _offer(store: Store, s: Sequence) -> None:
    """Let other sequences reuse the settled pages that they could before: those of keys without a salt."""
    key = b""
    for p, known in enumerate(s.keys if s.shareable else ()):
        key = page_key(key, s.token_ids[p * PAGE_SIZE : (p + 1) * PAGE_SIZE], store.codec_name)
        if known != key:
            break
        if s.pages[p].live == FULL:
            store.prefix.insert(key, s.pages[p])
