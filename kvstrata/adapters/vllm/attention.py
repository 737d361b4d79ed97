"""One layer's attention and writes in a step of an engine: a batch of decoding requests, then chunks. Knows nothing of any engine.

Order matters. Pages that settle inside the step are written before anything is read, for another request of the same step may have found
them in the cache. A decoding token goes to the ring before it attends, for it reads itself there. A chunk's last tokens go to the ring
after it attended, for its first queries read what they overwrite.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvstrata.adapters.vllm.geometry import Chunk
from kvstrata.adapters.vllm.rows import DecodeRows, Decodes
from kvstrata.adapters.vllm.tables import Before, Held, Tables
from kvstrata.ops import dense, quant
from kvstrata.ops.decode import decode
from kvstrata.ops.extend import extend
from kvstrata.ops.table import PageTable
from kvstrata.ops.write import settle_pages, write_dense, write_pages
from kvstrata.types import PAGE_SIZE, Tier


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tokens that go to the ring: int32 [N, n] frames of each token's page, int32 [N] its place there, int64 [N] its row of the batch."""

    frames: Tensor
    places: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Pages of one tier: frames int32 [P, n] to write to; from rows of the batch, int64 [P, 32], or from dense pages, int32 [P, n]."""

    tier: Tier
    frames: Tensor
    rows: Tensor | None = None
    source: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Rows [start, end) of the batch, in pieces of a group at most; cu_seqlens: where they begin, counted from `start`."""

    start: int
    end: int
    cu_seqlens: list[int]
    table: PageTable
    ring_first: Tokens | None
    pages: tuple[Pages, ...]
    ring_last: Tokens | None


@dataclass(frozen=True, slots=True, eq=False)
class BeforeStep:
    """What is written into every layer's arena before a step's forward pass. cleared: int64 [N], frames of rings that are new."""

    pages: tuple[Pages, ...]
    cleared: Tensor | None

    @property
    def is_nothing(self) -> bool:
        return not self.pages and self.cleared is None


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What every layer does in a step; made once. Tensors lie on the device."""

    decodes: Decodes | None
    chunks: Chunks | None


class StepPlanner:
    """Makes the plans of steps from the running requests' tables."""

    def __init__(self, tables: Tables, rows: DecodeRows | None = None) -> None:
        self.tables = tables
        self.rows = rows or DecodeRows(tables)
        self.group = tables.group

    def plan(self, requests: list[tuple[str, int, int]]) -> StepPlan:
        """requests: (id, tokens before the step, tokens in it), in the batch's order. Those of one token that come first are decoded; one
        that comes later, as an engine has it where a prompt's first chunk is a single token, is a chunk like any other."""
        first_chunk = next((i for i, (_, _, new) in enumerate(requests) if new != 1), len(requests))
        decodes = self._decodes(requests[:first_chunk]) if first_chunk else None
        return StepPlan(decodes, self._chunks(requests[first_chunk:], first_chunk) if requests[first_chunk:] else None)

    def idle(self, count: int) -> StepPlan:
        """A step of `count` rows of nobody, such as one that warms up or is captured."""
        return StepPlan(self.rows.idle(count), None)

    def _decodes(self, requests: list[tuple[str, int, int]]) -> Decodes:
        return self.rows.fill([self.tables.held(i).slot for i, _, _ in requests], [before for _, before, _ in requests])

    def _chunks(self, requests: list[tuple[str, int, int]], first_row: int) -> Chunks:
        row, work = first_row, []
        for request_id, before, new in requests:
            work.append((self.tables.held(request_id), Chunk(row, before, before + new, self.group)))
            row += new
        pieces = [(held, piece) for held, chunk in work for piece in chunk.pieces]
        cu_seqlens = [0]
        for _, piece in pieces:
            cu_seqlens.append(cu_seqlens[-1] + piece.end - piece.start)
        table = self.tables.view([h for h, _ in pieces], [p.settled for _, p in pieces], [p.ring for _, p in pieces])
        return Chunks(
            first_row, row, cu_seqlens, table,
            self._tokens([(held, chunk, chunk.to_ring_first) for held, chunk in work]),
            self._pages(work),
            self._tokens([(held, chunk, chunk.to_ring_last) for held, chunk in work]),
        )  # fmt: skip

    def _tokens(self, work: list[tuple[Held, Chunk, range]]) -> Tokens | None:
        frames, places, rows = [], [], []
        for held, chunk, positions in work:
            for position in positions:
                frames.append(self.tables.ring_frames(held, position // PAGE_SIZE))
                places.append(position % PAGE_SIZE)
                rows.append(chunk.row_of(position))
        if not rows:
            return None
        return Tokens(self._tensor(frames), self._tensor(places), self._tensor(rows).long())

    def _pages(self, work: list[tuple[Held, Chunk]]) -> tuple[Pages, ...]:
        copied: dict[Tier, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        # with the row of each page's first token
        written: dict[Tier, list[tuple[tuple[int, ...], int]]] = {}
        for held, chunk in work:
            for page in chunk.from_ring:
                copied.setdefault(held.tiers[page], []).append((held.frames[page], self.tables.ring_frames(held, page)))
            for page in chunk.whole:
                written.setdefault(held.tiers[page], []).append((held.frames[page], chunk.row_of(page * PAGE_SIZE)))
        out = []
        for tier, pairs in copied.items():
            dst, src = zip(*pairs, strict=True)
            out.append(Pages(tier, self._tensor(dst), source=self._tensor(src)))
        for tier, jobs in written.items():
            dst, first = zip(*jobs, strict=True)
            rows = np.add.outer(np.array(first), np.arange(PAGE_SIZE))
            out.append(Pages(tier, self._tensor(dst), rows=self._tensor(rows).long()))
        return tuple(out)

    def before(self, before: Before) -> BeforeStep:
        """What is written before the forward pass, grouped by tier."""
        pages = []
        for tier in sorted({s.tier for s in before.settles}):
            found = [s for s in before.settles if s.tier is tier]
            pages.append(Pages(tier, self._tensor([s.dst for s in found]), source=self._tensor([s.src for s in found])))
        return BeforeStep(tuple(pages), self._tensor(before.rings).long() if before.rings else None)

    def _tensor(self, values: object) -> Tensor:
        return self.tables.on_device(values)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """head_dim, dense_dtype: of the store. scale: of q·k."""

    head_dim: int
    dense_dtype: torch.dtype
    scale: float

    def forward(self, arena: Tensor, plan: StepPlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """q, out [N, Hq, D], k, v [N, H, D] (k and q after RoPE); arena uint8 [F, H, frame_bytes] of the layer."""
        decodes, chunks = plan.decodes, plan.chunks
        if chunks is not None:
            dense_k, dense_v = self._dense(k, v)
            self._append(arena, chunks.ring_first, dense_k, dense_v)
            self.write(arena, chunks.pages, dense_k, dense_v)
        if decodes is not None:
            self._decode(arena, decodes, q[: decodes.count], k[: decodes.count], v[: decodes.count], out[: decodes.count])
        if chunks is not None:
            rows = slice(chunks.start, chunks.end)
            new_q, new_k, new_v = (x[rows].contiguous() for x in (q, k, v))
            out[rows] = extend(new_q, new_k, new_v, chunks.cu_seqlens, arena, chunks.table, self.scale, dense_dtype=self.dense_dtype)
            self._append(arena, chunks.ring_last, dense_k, dense_v)

    def _dense(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v as BF16 pages hold them."""
        return k.to(self.dense_dtype), quant.rotate(v).to(self.dense_dtype)

    def _decode(self, arena: Tensor, decodes: Decodes, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Two launches where the model computes in what BF16 pages hold: nothing is allocated, converted or read back."""
        rotate = v.dtype == self.dense_dtype
        if not rotate:
            k, v = self._dense(k, v)
        write_dense(arena, decodes.ring_frames, decodes.places, k, v, rotate=rotate)
        decode(q.contiguous(), arena, decodes.table, self.scale, dense_dtype=self.dense_dtype, out=out, workspace=decodes.workspace)

    def prepare(self, arena: Tensor, before: BeforeStep) -> None:
        # first the pages: a ring that is new may have been another request's until now
        self.write(arena, before.pages)
        if before.cleared is not None:
            arena[before.cleared] = 0

    def _append(self, arena: Tensor, tokens: Tokens | None, k: Tensor, v: Tensor) -> None:
        if tokens is not None:
            write_dense(arena, tokens.frames, tokens.places, k[tokens.rows], v[tokens.rows])

    def write(self, arena: Tensor, pages: tuple[Pages, ...], k: Tensor | None = None, v: Tensor | None = None) -> None:
        """Write whole pages: from the ring, or from the batch's k and v, both as they are stored."""
        for job in pages:
            if job.source is not None and job.tier is Tier.BF16:
                arena[job.frames.flatten().long()] = arena[job.source.flatten().long()]
            elif job.source is not None:
                settle_pages(arena, job.source, job.frames, job.tier, self.head_dim, self.dense_dtype)
            else:
                assert job.rows is not None and k is not None and v is not None
                self._write_rows(arena, job, k[job.rows], v[job.rows])

    def _write_rows(self, arena: Tensor, job: Pages, k: Tensor, v: Tensor) -> None:
        if job.tier is Tier.BF16:
            arena[job.frames.flatten().long()] = dense.to_frames(k, v, arena.shape[-1]).flatten(0, 1)
        else:
            write_pages(arena, job.frames, k, v, job.tier)
