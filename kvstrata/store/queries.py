"""The newest queries of sequences that have anchors, by which those are chosen. Knows nothing of how.

Each sequence has a ring of NUM_QUERIES places: the query of position p lies in place p % NUM_QUERIES, so a step of decoding overwrites
the oldest one, for a whole batch in one operation a layer.
"""

import torch
from torch import Tensor

from kvstrata.ops.score import NUM_QUERIES

NONE = -1
"""The ring of a sequence that has none."""


class Queries:
    """Rings, by number, reference-counted as frames are. Their memory grows with them, and is made when the first query comes."""

    def __init__(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_layers, self._dtype, self._device = num_layers, dtype, device
        self._buffer: Tensor | None = None  # [rings, layers, NUM_QUERIES, Hq, D]
        self.ref_counts: list[int] = []

    @property
    def ring_bytes(self) -> int:
        """Bytes of one ring; 0 before the first query."""
        return 0 if self._buffer is None else self._buffer[0].nbytes

    def take(self) -> int:
        """A ring, of which the caller holds the one reference; its content is arbitrary."""
        free = next((i for i, n in enumerate(self.ref_counts) if not n), None)
        if free is not None:
            self.ref_counts[free] = 1
            return free
        self.ref_counts.append(1)
        return len(self.ref_counts) - 1

    def share(self, ring: int) -> int:
        if ring != NONE:
            self.ref_counts[ring] += 1
        return ring

    def drop(self, ring: int) -> None:
        if ring != NONE:
            self.ref_counts[ring] -= 1

    def holds(self, ring: int) -> bool:
        """Whether queries were ever written to the ring."""
        return ring != NONE and self._buffer is not None and ring < len(self._buffer)

    def shared(self, ring: int) -> bool:
        return self.ref_counts[ring] > 1

    def copy(self, ring: int) -> int:
        """A ring of the same content."""
        twin = self.take()
        if self._buffer is not None and ring < len(self._buffer):
            self._grow(self._buffer)[twin] = self._buffer[ring]
        return twin

    def write(self, layer: int, rings: Tensor, places: Tensor, q: Tensor) -> None:
        """q [N, Hq, D] into places int64 [N] of rings int64 [N]."""
        buffer = self._grow(q)
        buffer[:, layer][rings, places] = q.detach().to(buffer.dtype)

    def _grow(self, like: Tensor) -> Tensor:
        shape = (self._num_layers, NUM_QUERIES, *like.shape[-2:])
        if self._buffer is None:
            self._buffer = torch.zeros(0, *shape, dtype=self._dtype, device=self._device)
        short = len(self.ref_counts) - len(self._buffer)
        if short > 0:
            # as many again: a growing batch is not copied for each sequence
            more = torch.zeros(max(short, len(self._buffer)), *shape, dtype=self._dtype, device=self._device)
            self._buffer = torch.cat([self._buffer, more])
        return self._buffer

    def read(self, layer: int, ring: int, first: int, end: int) -> Tensor:
        """Queries of positions [first, end), NUM_QUERIES at most, [end - first, Hq, D]."""
        assert self._buffer is not None and 0 < end - first <= NUM_QUERIES
        return self._buffer[ring, layer, torch.arange(first, end, device=self._device) % NUM_QUERIES]
