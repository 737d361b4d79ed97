"""Thinning: of pages with too many tokens the best ones live on, gathered into pages of their own, each layer and KV head its own choice.

Positions, RoPE phases and the sequence's token ids stay what they were, so a prefix matches as before. Pages that other sequences hold
are only let go of. Knows how much has to go and where it lies; what a token's score is, others say (store/signals.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.ops import dense
from kvstrata.ops.write import write_pages
from kvstrata.store.arena import OutOfFramesError
from kvstrata.store.contents import Contents, tokens_of
from kvstrata.store.gathered import EMPTY, Gathered
from kvstrata.store.page import Page, Sequence
from kvstrata.types import PAGE_SIZE, Plan, Thinning, Tier

if TYPE_CHECKING:
    from kvstrata.store.store import Store

Score = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Called with a layer, K and V [n, H, D] by position and which of them are there, bool [n, H]; -> score float32 [H, n]."""


def thinnable(s: Sequence, thinning: Thinning) -> list[int]:
    """Settled pages that may lose tokens."""
    return [p for p in range(s.settled) if s.pages[p].frames and p not in thinning.spared]


def living(store: "Store", s: Sequence) -> tuple[tuple[float, ...], int, Tier]:
    """Of each page, the share of its tokens that lives on as survivors, over layers and KV heads; how many pages those fill,
    and their highest tier."""
    if not s.survivors:
        return (), 0, Tier.BF16
    counts = np.zeros(len(s.pages), np.int64)
    for page in s.survivors:
        np.add.at(counts, page.positions[page.positions != EMPTY] // PAGE_SIZE, 1)
    shares = counts / (PAGE_SIZE * store.config.num_layers * store.config.num_kv_heads)
    return tuple(shares.tolist()), len(s.survivors), max(page.tier for page in s.survivors)


def is_due(s: Sequence, thinning: Thinning) -> bool:
    """Whether there are too many tokens, or too many pages for those that there are."""
    pages = thinnable(s, thinning)
    stays = sum(page.live_tokens for p, page in enumerate(s.pages) if p in thinning.spared or p >= s.settled)
    crowded = thinning.repack and len(pages) + len(s.survivors) > thinning.pages
    # pages of survivors are thinned too: a newest turn that grows, of which nothing goes yet, leaves them less room
    return bool(pages or s.survivors) and (crowded or s.held_tokens - stays > thinning.count + thinning.slack)


def staged(s: Sequence, plan: Plan) -> frozenset[int]:
    """Pages that are about to be thinned, from the planes that they have and not from those that the plan would leave them."""
    thinning = plan.thinning
    if thinning is None or thinning.staging is None:
        return frozenset()
    return frozenset(thinnable(s, thinning))


@dataclass(frozen=True, slots=True)
class _Moves:
    """What a thinning does. stays: pages of survivors that stay where they are, without some tokens; positions int32 [layers, H, slots]:
    what is gathered anew, EMPTY in slots of no use, which are the last of each head."""

    stays: list[Gathered]
    positions: NDArray[np.int32]


def thin(store: "Store", s: Sequence, thinning: Thinning, score: Score) -> int:
    """Thin a sequence; how many tokens a layer and KV head lost. Raises OutOfFramesError before anything changed."""
    pages = thinnable(s, thinning)
    before = s.held_tokens
    contents, where = Contents(store, s, s.num_tokens), _candidates(store, s, pages)
    kept = _choose(store, s, thinning, score, contents, where)
    if not thinning.repack:
        _mask(store, s, pages, kept[0, 0])
        return before - s.held_tokens
    moves = _plan_moves(s, thinning, kept)
    slots = moves.positions.shape[-1]
    stays = {page.frames for page in moves.stays}
    gone = [page.frames for page in s.survivors if page.frames not in stays] + [s.pages[p].frames for p in pages]
    wanted = slots // PAGE_SIZE * store.layout.frames(thinning.tier)
    _check_room(store, wanted, gone)
    # what lives on is read before its frames are let go of, so that a full arena can be thinned
    moving = [_read(store, layer, contents, moves.positions[layer]) for layer in range(store.config.num_layers)]
    for frames in gone:
        store.arena.release(frames)
    fresh = _write(store, store.allocate(wanted), moves.positions, moving, thinning.tier)
    for p in pages:
        s.replace_page(p, Page(Tier.EVICTED, (), 0))
    s.survivors = [*moves.stays, *fresh]
    s.version += 1
    return before - s.held_tokens


def _check_room(store: "Store", wanted: int, gone: list[tuple[int, ...]]) -> None:
    """Raise OutOfFramesError unless there are `wanted` frames once `gone` are let go of, of which others but the prefix index hold none."""
    held = np.zeros(store.arena.num_frames, np.int32)
    for frames in (*gone, *(page.frames for page in store.prefix.pages())):
        np.add.at(held, list(frames), 1)
    room = store.arena.free + int(((held > 0) & (held == store.arena.ref_counts)).sum())
    if wanted > room:
        raise OutOfFramesError(wanted, room, store.holders())


def _mask(store: "Store", s: Sequence, pages: list[int], kept: NDArray[np.bool_]) -> None:
    """Let tokens die where they are, survivors of an earlier plan among them: kept bool [tokens], for all layers and heads."""
    for p in pages:
        page, bits = s.pages[p], np.packbits(kept[p * PAGE_SIZE : (p + 1) * PAGE_SIZE], bitorder="little")
        live = page.live & int.from_bytes(bits.tobytes(), "little")
        if not live:
            store.arena.release(page.frames)
        s.replace_page(p, Page(page.tier, page.frames, live) if live else Page(Tier.EVICTED, (), 0))
    store.keep_survivors(s, kept)
    s.version += 1


def _candidates(store: "Store", s: Sequence, pages: list[int]) -> NDArray[np.bool_]:
    """bool [layers, H, tokens]: what may live on."""
    c = store.config
    masks = np.zeros((len(s.pages), PAGE_SIZE), np.bool_)
    masks[pages] = tokens_of([s.pages[p].live for p in pages])
    # after a crop survivors may lie in a page that has not settled again
    where = np.broadcast_to(masks.ravel()[: s.num_tokens], (c.num_layers, c.num_kv_heads, s.num_tokens)).copy()
    for page in s.survivors:
        layer, head, slot = np.nonzero(page.positions != EMPTY)
        where[layer, head, page.positions[layer, head, slot]] = True
    return where


def _choose(
    store: "Store", s: Sequence, thinning: Thinning, score: Score, contents: Contents, where: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """bool [layers, H, tokens]: the `count` best candidates of each layer and head."""
    layers, heads, n = where.shape
    scores = torch.empty(layers, heads, n)
    for layer in range(layers):
        keys, values, _, there = contents.read(layer, store.arena.buffer[layer])
        scores[layer] = score(layer, keys, values, there).float().cpu()
    if not thinning.per_head:
        # each layer and head has one vote, whatever the size of its scores
        total = scores.clamp(min=0).sum(-1, keepdim=True).clamp(min=1e-30)
        scores = (scores / total).mean((0, 1), keepdim=True).expand_as(scores)
    scores = scores.masked_fill(~torch.from_numpy(where), -torch.inf)
    best = scores.topk(min(thinning.count, n), dim=-1).indices
    kept = torch.zeros(where.shape, dtype=torch.bool).scatter_(-1, best, True)
    return kept.numpy() & where


def _plan_moves(s: Sequence, thinning: Thinning, kept: NDArray[np.bool_]) -> _Moves:
    """Which survivors stay in their pages: all that the most pages allow, the fullest pages first, for what moves is quantized again."""
    thinned = []
    for page in s.survivors:
        layer, head, slot = np.nonzero(page.positions != EMPTY)
        alive = np.zeros(page.positions.shape, np.bool_)
        alive[layer, head, slot] = kept[layer, head, page.positions[layer, head, slot]]
        positions = np.where(alive, page.positions, EMPTY).astype(np.int32)
        thinned.append(Gathered(page.tier, page.frames, positions, page.whole & alive))
    # pages of another tier than the plan's are gathered anew in any case
    stays = sorted((page for page in thinned if page.tier is thinning.tier and page.tokens), key=lambda page: -page.tokens)
    while True:
        moving = kept.copy()
        for page in stays:
            layer, head, slot = np.nonzero(page.positions != EMPTY)
            moving[layer, head, page.positions[layer, head, slot]] = False
        slots = -(-int(moving.sum(-1).max(initial=0)) // PAGE_SIZE) * PAGE_SIZE
        if not stays or len(stays) + slots // PAGE_SIZE <= thinning.pages:
            break
        stays = stays[:-1]
    positions = np.full((*moving.shape[:2], slots), EMPTY, np.int32)
    layer, head, at = np.nonzero(moving)
    first = np.concatenate([[0], np.cumsum(moving.sum(-1).ravel())[:-1]]).reshape(moving.shape[:2])
    positions[layer, head, np.arange(len(at)) - first[layer, head]] = at
    return _Moves(stays, positions)


def _read(store: "Store", layer: int, contents: Contents, positions: NDArray[np.int32]) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
    """One layer's survivors at int32 [H, slots] positions: K and V [slots, H, D], and bool [H, slots], which never were in planes."""
    arena = store.arena.buffer[layer]
    if not positions.size:
        empty = arena.new_zeros(0, store.config.num_kv_heads, store.config.head_dim, dtype=store.dense_dtype)
        return empty, empty, np.zeros(positions.shape, np.bool_)
    keys, values, whole, _ = contents.read(layer, arena)
    # a slot without a token repeats its page's first one, so that it widens no group's range; a page of none repeats the head's first
    first = positions.reshape(len(positions), -1, PAGE_SIZE)[:, :, :1].repeat(PAGE_SIZE, 2).reshape(positions.shape)
    filled = np.where(positions != EMPTY, positions, np.where(first != EMPTY, first, positions[:, :1]))
    index = torch.from_numpy(np.maximum(filled, 0).astype(np.int64)).to(arena.device).T
    at = index[:, :, None].expand(-1, -1, keys.shape[-1])
    return keys.gather(0, at), values.gather(0, at), whole.gather(0, index).T.cpu().numpy() & (positions != EMPTY)


def _write(
    store: "Store", frames: list[int], positions: NDArray[np.int32], content: list[tuple[Tensor, Tensor, NDArray[np.bool_]]], tier: Tier
) -> list[Gathered]:
    """Pages of survivors at int32 [layers, H, slots] positions, of the layers' contents."""
    n, pages = store.layout.frames(tier), positions.shape[-1] // PAGE_SIZE
    if not pages:
        return []
    rows = [tuple(frames[i * n : (i + 1) * n]) for i in range(pages)]
    index = torch.tensor(rows, dtype=torch.int32, device=store.arena.buffer.device)
    for arena, (keys, values, _) in zip(store.arena.buffer, content, strict=True):
        k, v = (x.unflatten(0, (-1, PAGE_SIZE)) for x in (keys, values))
        if tier is Tier.BF16:
            arena[index.long()] = dense.to_frames(k, v, arena.shape[-1])
        else:
            write_pages(arena, index, k, v, tier, encode=store.layout.encode)
    whole = np.stack([w for _, _, w in content])
    at = [slice(i * PAGE_SIZE, (i + 1) * PAGE_SIZE) for i in range(pages)]
    return [Gathered(tier, f, positions[:, :, i].copy(), whole[:, :, i].copy()) for f, i in zip(rows, at, strict=True)]
