"""What rows of one token read in a step, at addresses that stay where they are, so that a CUDA graph can hold the reading of them.

Whatever a step has to say of its rows goes to the device in one copy; page tables are selected there. Rows that a step does not fill have
no page, and their tokens go to the dead slot: a graph may have more rows than a step. Knows nothing of any engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.adapters.vllm.tables import Tables
from kvstrata.ops.decode_cuda import Workspace
from kvstrata.ops.table import ALL_LIVE, PageTable, Segment
from kvstrata.types import PAGE_SIZE, Tier


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """Rows [0, count) of the batch: one token of each of `count` requests. ring_frames int32 [count, n], places int32 [count]: where each
    token goes. workspace: of the attention kernel, if it takes one."""

    count: int
    ring_frames: Tensor
    places: Tensor
    table: PageTable
    workspace: Workspace | None


class DecodeRows:
    def __init__(self, tables: Tables, workspace: Workspace | None = None) -> None:
        rows, device = tables.num_slots, tables.device
        self._tables, self.workspace = tables, workspace
        self._tiers = tuple(tables.frames)
        dense_pages = tables.frames[Tier.BF16].shape[1]
        shapes = {
            "slots": (rows,), "places": (rows,), "counts": (len(self._tiers), rows), "live": (rows, dense_pages),
            "ring": (rows, tables.dense_frames),
        }  # fmt: skip
        size = sum(int(np.prod(s)) for s in shapes.values())
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        host, on_device, at = self._host.numpy(), {}, 0
        views: dict[str, NDArray[np.int32]] = {}
        for name, shape in shapes.items():
            end = at + int(np.prod(shape))
            views[name], on_device[name] = host[at:end].reshape(shape), self._device[at:end].view(shape)
            at = end
        self._slots, self._places, self._counts, self._live, self._ring = views.values()
        self._live[:] = ALL_LIVE
        self._of = on_device
        self._frames = {t: torch.zeros(rows, *x.shape[1:], dtype=torch.int32, device=device) for t, x in tables.frames.items()}
        self._made: dict[int, Decodes] = {}

    def fill(self, slots: Sequence[int], positions: Sequence[int]) -> Decodes:
        """Rows of these requests' tokens at these positions. Each sees all pages that its request holds, and its group up to itself."""
        n, tables = len(slots), self._tables
        if self._copied is not None:
            # the last step's copy may be on its way
            self._copied.synchronize()
        slot, position = np.asarray(slots, np.int64), np.asarray(positions, np.int64)
        self._slots[:n], self._places[:n] = slot, position % PAGE_SIZE
        self._slots[n:] = self._places[n:] = 0
        self._counts[:, :n], self._counts[:, n:] = tables.counts[:, slot], 0
        in_ring = position % tables.group + 1
        first = np.arange(tables.group_pages) * PAGE_SIZE
        tokens = np.clip(in_ring[:, None] - first, 0, PAGE_SIZE)
        # shifted in 64 bits: a whole page's mask is -1 in 32
        self._live[:n, : tables.group_pages] = ((1 << tokens) - 1).astype(np.uint32).view(np.int32)
        self._ring[:n] = tables.rings[slot, position // PAGE_SIZE % tables.group_pages]
        self._ring[n:] = 0
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if n:
            index = self._of["slots"][:n]
            for tier, frames in self._frames.items():
                torch.index_select(tables.frames[tier], 0, index, out=frames[:n])
        return self._rows(n)

    def idle(self, count: int) -> Decodes:
        """`count` rows of nobody."""
        self.fill((), ())
        return self._rows(count)

    def _rows(self, count: int) -> Decodes:
        made = self._made.get(count)
        if made is None:
            counts, live = self._of["counts"], self._of["live"]
            segments = tuple(
                Segment(t, self._frames[t][:count], counts[i, :count], live[:count, :, None] if t is Tier.BF16 else None)
                for i, t in enumerate(self._tiers)
            )
            table = PageTable(segments, count)
            made = Decodes(count, self._of["ring"][:count], self._of["places"][:count], table, self.workspace)
            self._made[count] = made
        return made
