"""One forward pass over a batch: frames reserved before it, K and V written layer by layer, books changed only at its end.

Nothing that existed before is touched until `commit`: pages that settle get frames of their own, shared pages are copied before a
token is appended. (A token appended to a page that only this sequence holds lands behind its live mask.) Knows nothing of models.
"""

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvstrata.ops import dense, quant
from kvstrata.ops.score import NUM_QUERIES
from kvstrata.ops.write import settle_pages, write_dense, write_pages
from kvstrata.store.anchors import AnchorJob, interval, is_due
from kvstrata.store.arena import DEAD_SLOT, OutOfFramesError
from kvstrata.store.page import FULL, Page, Sequence
from kvstrata.store.queries import NONE
from kvstrata.store.signals import Watch, wants_newest
from kvstrata.types import PAGE_SIZE, Tier

if TYPE_CHECKING:
    from kvstrata.store.store import Store


@dataclass(slots=True)
class _PageJob:
    """Pages that are written whole, one tier. index[p][j]: row of token j in the step's source (see Step._source)."""

    frames: list[tuple[int, ...]] = field(default_factory=list)
    index: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class _Change:
    """What commit does to one sequence: pages from `first` on are replaced."""

    sequence: Sequence
    token_ids: list[int]
    first: int
    pages: list[Page]
    settled: int
    anchors: AnchorJob | None = None
    watch: Watch | None = None
    ring: int = NONE
    queries_from: int = 0


class Step:
    """Made by Store.begin. Then, in this order: `table[layer]` (what was stored before), `write` once a layer, `commit` or `abort`."""

    def __init__(self, store: "Store", sequences: list[Sequence], token_ids: list[list[int]]) -> None:
        self.table = store.tables.build(sequences)
        self.cu_seqlens = [0]
        for ids in token_ids:
            self.cu_seqlens.append(self.cu_seqlens[-1] + len(ids))
        self.open = True
        self._store = store
        self.sequences = sequences
        self._written: set[int] = set()
        # once to count the frames, once to place them: they are had all together or not at all
        self._new: list[int] = []
        self._choosing = self._staging = True
        try:
            self._new = store.allocate(self._count(token_ids))
        except OutOfFramesError:
            if not self._chooses and not self._stages:
                raise
            # without frames for other anchors those that are there stay; and pages settle at once where they are to be in the end
            self._choosing = self._staging = False
            self._new = store.allocate(self._count(token_ids))
        self._pool, self._placing = iter(self._new), True
        try:
            self._plan_all(token_ids)
        except Exception:
            # a residual head's file may be gone since the plan was made
            store.arena.release(self._new)
            raise
        self._finish_jobs()
        self._plan_queries()
        for change in self._changes:
            s = change.sequence
            old = {i for page in s.pages[change.first :] for i in page.frames}
            new = [i for page in change.pages for i in page.frames if i not in old]
            if change.anchors is not None:
                # beside those that they replace
                new += [i for frames in change.anchors.frames for i in frames]
            # most steps of decoding take no frame, and counting those held is not for nothing
            if new:
                s.peak_frames = max(s.peak_frames, s.frames + len(new))
            if s.plan.thinning is not None:
                s.peak_tokens = max(s.peak_tokens, s.held_tokens + len(change.token_ids))

    @property
    def reserved(self) -> list[int]:
        """Frames that the step holds."""
        return self._new

    @property
    def rings(self) -> list[int]:
        """Rings of queries that the step holds."""
        return [change.ring for change in self._changes if change.ring not in (NONE, change.sequence.ring)]

    # planning, on the host

    def _count(self, token_ids: list[list[int]]) -> int:
        """Frames that the step needs."""
        self._needed, self._chooses, self._stages, self._placing = 0, False, False, False
        self._plan_all(token_ids)
        return self._needed

    def _plan_all(self, token_ids: list[list[int]]) -> None:
        self._changes: list[_Change] = []
        self._jobs: dict[Tier, _PageJob] = {}
        self._append: list[tuple[tuple[int, ...], int, int]] = []
        self._sources: dict[Tier, list[tuple[int, ...]]] = {}
        self._copies: list[tuple[int, int]] = []
        self._settling: dict[Tier, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        self._slots: list[tuple[Tier, list[int | tuple[Tier, int]]]] = []
        for i, (s, ids) in enumerate(zip(self.sequences, token_ids, strict=True)):
            self._plan_sequence(s, ids, self.cu_seqlens[i])

    def _allocate(self, n: int) -> tuple[int, ...]:
        if not self._new:
            self._needed += n
            return (DEAD_SLOT,) * n
        return tuple(itertools.islice(self._pool, n))

    def _plan_sequence(self, s: Sequence, ids: list[int], row: int) -> None:
        before, after = s.num_tokens, s.num_tokens + len(ids)
        settled = max(s.settled, self._store.first_window_page(after))
        pages = []
        for p in range(s.settled, -(-after // PAGE_SIZE)):
            pages.append(self._plan_page(s, p, settled, before, after, row))
        change = _Change(s, ids, s.settled, pages, settled)
        rows = slice(row, row + len(ids))
        change.anchors = self._plan_anchors(change, rows)
        # a step that takes no frame is watched like any other
        if self._placing and ids and s.plan.thinning is not None:
            change.watch = Watch(self._store, s, s.plan.thinning, rows)
        self._changes.append(change)

    def _plan_anchors(self, change: _Change, rows: slice) -> AnchorJob | None:
        s, wanted, new = change.sequence, change.sequence.plan.anchors, len(change.token_ids)
        settles = change.settled != s.settled
        if wanted is None or not new or not self._choosing or not is_due(s, wanted, new, settles, interval(self._store)):
            return None
        pages = s.pages[: s.settled] + change.pages
        num_pages = AnchorJob.num_pages(wanted, pages, change.settled)
        frames = [self._allocate(self._store.layout.frames(wanted.tier)) for _ in range(num_pages)]
        self._chooses |= bool(frames)
        return AnchorJob(self._store, s, wanted, pages, change.settled, rows, frames) if frames and self._new else None

    def _plan_queries(self) -> None:
        """Where the chunk's newest queries go. A ring that another sequence reads too, or that is replaced whole, stays as it is."""
        queries = self._store.queries
        rings: list[int] = []
        places: list[int] = []
        rows: list[int] = []
        for change, end in zip(self._changes, self.cu_seqlens[1:], strict=True):
            s, new, anchors = change.sequence, len(change.token_ids), change.sequence.plan.anchors
            chooses = anchors is not None and not (s.anchors and not anchors.refresh)
            if not chooses and not wants_newest(s.plan):
                continue
            kept, after = min(new, NUM_QUERIES), s.num_tokens + new
            change.ring, change.queries_from = s.ring, max(s.queries_from, after - NUM_QUERIES)
            if s.ring == NONE or kept == NUM_QUERIES:
                change.ring, change.queries_from = queries.take(), after - kept
            elif queries.shared(s.ring):
                change.ring = queries.copy(s.ring)
            rings += [change.ring] * kept
            places += [p % NUM_QUERIES for p in range(after - kept, after)]
            rows += range(end - kept, end)
        device = self._store.arena.buffer.device
        self._queries = torch.tensor([rings, places, rows], device=device) if rows else None

    def _plan_page(self, s: Sequence, p: int, settled: int, before: int, after: int, row: int) -> Page:
        old = s.pages[p] if p < len(s.pages) else None
        start = p * PAGE_SIZE
        known = max(0, min(PAGE_SIZE, before - start))
        count = min(PAGE_SIZE, after - start)
        live = (old.live if old else 0) | ((1 << count) - (1 << known))
        tier = self._tier(s, p, p < settled, count)
        if p < settled:
            live &= ~s.plan.dead.get(p, 0)
        if tier is Tier.EVICTED or not live:
            return Page(Tier.EVICTED, (), 0)
        if tier is Tier.BF16 and old is not None and old.tier is Tier.BF16:
            return Page(tier, self._append_tokens(old, known, count, row - before + start), live)
        return Page(tier, self._rewrite(old, tier, known, count, row - before + start, live), live)

    def _rewrite(self, old: Page | None, tier: Tier, known: int, count: int, first_row: int, live: int) -> tuple[int, ...]:
        """Write the page whole, its known tokens from what is stored of them."""
        frames = self._allocate(self._store.layout.frames(tier))
        if old is not None and old.tier is Tier.BF16 and known == PAGE_SIZE and live == FULL:
            # from frames to frames, nothing gathered on the way
            self._settling.setdefault(tier, []).append((old.frames, frames))
            return frames
        rows: list[int | tuple[Tier, int]] = []
        if old is not None and known:
            group = self._sources.setdefault(old.tier, [])
            rows = [(old.tier, len(group) * PAGE_SIZE + j) for j in range(known)]
            group.append(old.frames)
        rows += [first_row + j if j < count else -1 for j in range(known, PAGE_SIZE)]
        # a live token stands in for each dead one, which would widen the range of its groups for nothing
        stand_in = rows[(live & -live).bit_length() - 1]
        rows = [row if live >> j & 1 or row == -1 else stand_in for j, row in enumerate(rows)]
        self._jobs.setdefault(tier, _PageJob()).frames.append(frames)
        self._slots.append((tier, rows))
        return frames

    def _tier(self, s: Sequence, p: int, settles: bool, count: int) -> Tier:
        if settles:
            tier, thinning = self._store.layout.check_tier(s.plan.tier(p)), s.plan.thinning
            last, staged = tier, tier if s.plan.weighing is None else max(tier, s.plan.weighing.tier)
            if thinning is not None and tier is not Tier.BF16:
                spared = p in thinning.spared
                if thinning.staging is not None or not spared:
                    last = min(tier, thinning.tier)
                if thinning.staging is not None and not spared:
                    staged = max(staged, thinning.staging)
            self._stages |= staged > last
            return staged if self._staging else last
        residual = self._store.layout.codec.residual_tier
        return residual if residual is not None and not self._store.config.window and count < PAGE_SIZE else Tier.BF16

    def _append_tokens(self, old: Page, known: int, count: int, first_row: int) -> tuple[int, ...]:
        frames = old.frames
        if count > known and self._store.arena.shared(frames):
            frames = self._allocate(len(frames))
            self._copies += list(zip(old.frames, frames, strict=True))
        for j in range(known, count):
            self._append.append((frames, j, first_row + j))
        return frames

    def _finish_jobs(self) -> None:
        """Rows of the source: stored pages by tier, then the chunk, then one row of zeros."""
        base, offset = {}, 0
        for tier in self._sources:
            base[tier] = offset
            offset += len(self._sources[tier]) * PAGE_SIZE
        zero = offset + self.cu_seqlens[-1]
        for tier, rows in self._slots:
            index = [base[r[0]] + r[1] if isinstance(r, tuple) else offset + r if r >= 0 else zero for r in rows]
            self._jobs[tier].index.append(index)
        device = self._store.arena.buffer.device
        self._tensors = {
            tier: (torch.tensor(job.frames, dtype=torch.int32, device=device), torch.tensor(job.index, device=device))
            for tier, job in self._jobs.items()
        }
        self._settle_frames = {
            tier: tuple(torch.tensor(f, dtype=torch.int32, device=device) for f in zip(*pairs, strict=True))
            for tier, pairs in self._settling.items()
        }
        self._source_frames = {tier: torch.tensor(f, dtype=torch.int32, device=device) for tier, f in self._sources.items()}
        if self._append:
            frames, tokens, rows_ = zip(*self._append, strict=True)
            self._append_to = tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in (frames, tokens, rows_))
        if self._copies:
            old, new = torch.tensor(self._copies, device=device).T
            self._store.arena.buffer[:, new] = self._store.arena.buffer[:, old]

    # the pass itself

    def write(self, layer: int, k: Tensor, v: Tensor, q: Tensor | None = None, scale: float = 1.0) -> None:
        """Store the chunk's K (after RoPE) and V of one layer: [N, H, D], packed as cu_seqlens says.

        q [N, Hq, D] and scale (of q·k): where a plan has anchors or thins, for queries choose what stays.
        Raises NonFiniteError naming layer, KV head, sequence and position, ValueError where q is missing; then only abort is left.
        """
        assert self.open, "the step has ended"
        self._scale = scale
        store, c = self._store, self._store.config
        shape = (self.cu_seqlens[-1], c.num_kv_heads, c.head_dim)
        if k.shape != shape or v.shape != shape or not 0 <= layer < c.num_layers:
            raise ValueError(f"layer {layer} of {c.num_layers}: k {list(k.shape)} and v {list(v.shape)}; both must be {list(shape)}")
        self._check_finite(layer, k, v, "")
        arena, codec = store.arena.buffer[layer], store.layout.codec
        dtype = store.dense_dtype
        k, told = k.to(dtype), v
        v = (quant.rotate(v) if codec.rotates_v else v).to(dtype)
        if dtype is torch.float16:
            self._check_finite(layer, k, v, " in float16")
        for tier, (old, new) in self._settle_frames.items():
            settle_pages(arena, old, new, tier, c.head_dim, dtype, encode=store.layout.encode)
        if self._tensors:
            k_source, v_source = self._source(arena, k, v)
            for tier, (frames, index) in self._tensors.items():
                if tier is Tier.BF16:
                    arena[frames.long()] = dense.to_frames(k_source[index], v_source[index], arena.shape[-1])
                else:
                    write_pages(arena, frames, k_source[index], v_source[index], tier, encode=store.layout.encode)
        if self._append:
            frames, tokens, rows = self._append_to
            write_dense(arena, frames, tokens, k[rows.long()], v[rows.long()])
        if q is None:
            if self._queries is not None or any(change.watch is not None for change in self._changes):
                raise ValueError("a sequence of the step has anchors or survivors, which queries choose; write needs them too")
            self._written.add(layer)
            return
        if self._queries is not None:
            rings, places, rows = self._queries
            store.queries.write(layer, rings, places, q[rows])
        for change in self._changes:
            if change.watch is not None:
                # a head has learned from values as the model gives them, not as they are stored
                change.watch.write(layer, arena, k, told, q, scale)
            if change.anchors is not None:
                newest = store.queries.read(layer, change.ring, change.queries_from, change.anchors.num_tokens)
                change.anchors.choose(layer, arena, newest, k, v, scale)
        self._written.add(layer)

    def _source(self, arena: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ks, vs = [], []
        for tier, frames in self._source_frames.items():
            old = self._store.read_pages(arena, frames, tier)
            ks.append(old[0].to(k.dtype).flatten(0, 1))
            vs.append(old[1].to(k.dtype).flatten(0, 1))
        zero = torch.zeros_like(k[:1])
        return torch.cat([*ks, k, zero]), torch.cat([*vs, v, zero])

    def _check_finite(self, layer: int, k: Tensor, v: Tensor, where: str) -> None:
        # on a GPU the check would wait for the device in every layer
        if k.is_cuda:
            return
        for name, x in (("K", k), ("V", v)):
            if quant.all_finite(x):
                continue
            row, head, channel = (~torch.isfinite(x)).nonzero()[0].tolist()
            b = next(i for i in range(len(self.sequences)) if row < self.cu_seqlens[i + 1])
            position = self.sequences[b].num_tokens + row - self.cu_seqlens[b]
            raise quant.NonFiniteError(
                f"{name} is {x[row, head, channel].item()}{where} at layer {layer}, KV head {head}, position {position} of sequence "
                f"{self.sequences[b].id}, channel {channel}; keys and values must be finite",
                (name, b, position, head),
            )

    def commit(self) -> None:
        """Make the step's tokens part of their sequences. Raises RuntimeError, after aborting, if a layer was not written."""
        assert self.open, "the step has ended"
        missing = sorted(set(range(self._store.config.num_layers)) - self._written)
        if missing:
            self.abort()
            raise RuntimeError(f"layers {missing} were not written; nothing was stored")
        self.open = False
        arena = self._store.arena
        for change in self._changes:
            s = change.sequence
            kept = {i for page in change.pages for i in page.frames}
            for page in s.pages[change.first :]:
                arena.release([i for i in page.frames if i not in kept])
            s.pages[change.first :] = change.pages
            s.token_ids += change.token_ids
            s.settled, s.version = change.settled, s.version + (change.settled != change.first or change.anchors is not None)
            if change.ring != s.ring:
                self._store.queries.drop(s.ring)
            s.ring, s.queries_from, s.scale = change.ring, change.queries_from, self._scale
            if change.anchors is not None:
                for old in s.anchors:
                    arena.release(old.frames)
                s.anchors, s.chosen_at = change.anchors.finish(), s.num_tokens
            if change.watch is not None:
                change.watch.commit()
            self._store.forget_queries(s)
            self._store.publish(s, change.first)
        self._store.step_ended(self)

    def abort(self) -> None:
        """Give the reserved frames back; sequences are as they were before `begin`."""
        if self.open:
            self.open = False
            self._store.arena.release(self._new)
            for change in self._changes:
                s = change.sequence
                if change.ring != s.ring:
                    self._store.queries.drop(change.ring)
                elif s.ring != NONE:
                    # the oldest queries may have been overwritten
                    s.queries_from = max(s.queries_from, s.num_tokens + len(change.token_ids) - NUM_QUERIES)
            self._store.step_ended(self)
