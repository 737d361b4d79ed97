"""The newest queries of sequences, in INT8: by them anchors and survivors are chosen and pages weighed. Knows nothing of how.

Each sequence has a ring of NUM_QUERIES places: the query of position p lies in place p % NUM_QUERIES, so a step of decoding overwrites
the oldest one, for a whole batch at once. docs/planner.md has what eight bits change of what is chosen.
"""

import torch
from torch import Tensor

from kvstrata.ops.score import NUM_QUERIES

NONE = -1
"""The ring of a sequence that has none."""


MOST = 127
"""The largest code: codes are symmetric, -128 is none."""


def quantized(q: Tensor) -> tuple[Tensor, Tensor]:
    """q [..., D] -> codes int8 [..., D] and scales float32 [...], the largest channel's magnitude over 127: q is codes * scales to half a
    scale. Zeros come back as zeros, a vector with NaN or an infinity as NaN throughout, which attends nothing. Never waits for a GPU."""
    x = q.detach().float()
    scales = x.abs().amax(-1) / MOST
    # what is no number has no code; a scale so small that it is rounded may leave more than MOST of itself
    codes = (x / scales[..., None]).round().clamp(-MOST, MOST).nan_to_num(0.0)
    return codes.to(torch.int8), scales


def ring_bytes(num_layers: int, num_heads: int, head_dim: int) -> int:
    """Bytes of one ring of a model with so many query heads, scales included."""
    return num_layers * NUM_QUERIES * num_heads * (head_dim * torch.int8.itemsize + torch.float32.itemsize)


class Queries:
    """Rings, by number, reference-counted as frames are. Their memory grows with them, and is made when the first query comes.

    dtype: what queries are read as.
    """

    def __init__(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_layers, self._dtype, self._device = num_layers, dtype, device
        # int8 [rings, layers, NUM_QUERIES, Hq, D] and float32 [rings, layers, NUM_QUERIES, Hq]
        self._held: tuple[Tensor, Tensor] | None = None
        self.ref_counts: list[int] = []

    @property
    def ring_bytes(self) -> int:
        """Bytes of one ring, scales included; 0 before the first query."""
        return 0 if self._held is None else sum(x[0].nbytes for x in self._held)

    @property
    def num_heads(self) -> int | None:
        """Query heads of each layer; None before the first query."""
        return None if self._held is None else self._held[1].shape[-1]

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
        return ring != NONE and self._held is not None and ring < len(self._held[0])

    def shared(self, ring: int) -> bool:
        return self.ref_counts[ring] > 1

    def copy(self, ring: int) -> int:
        """A ring of the same content."""
        twin = self.take()
        if self._held is not None and ring < len(self._held[0]):
            for x in self._grow(self._held[0]):
                x[twin] = x[ring]
        return twin

    def write(self, layer: int, rings: Tensor, places: Tensor, q: Tensor) -> None:
        """q [N, Hq, D] into places int64 [N] of rings int64 [N]."""
        for held, new in zip(self._grow(q), quantized(q), strict=True):
            held[:, layer][rings, places] = new

    def _grow(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """What is held, with room for every ring that was taken. like: [..., Hq, D]."""
        shape = (self._num_layers, NUM_QUERIES, *like.shape[-2:])
        codes, scales = self._held or (self._zeros(0, *shape, dtype=torch.int8), self._zeros(0, *shape[:-1], dtype=torch.float32))
        short = len(self.ref_counts) - len(codes)
        if short > 0:
            # as many again: a growing batch is not copied for each sequence
            more = max(short, len(codes))
            codes, scales = (torch.cat([x, self._zeros(more, *x.shape[1:], dtype=x.dtype)]) for x in (codes, scales))
        self._held = codes, scales
        return self._held

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def read(self, layer: int, ring: int, first: int, end: int) -> Tensor:
        """Queries of positions [first, end), NUM_QUERIES at most, [end - first, Hq, D]."""
        assert self._held is not None
        places = self._places(first, end)
        codes, scales = (x[ring, layer, places] for x in self._held)
        return (codes * scales[..., None]).to(self._dtype)

    def _places(self, first: int, end: int) -> Tensor:
        assert 0 < end - first <= NUM_QUERIES
        return torch.arange(first, end, device=self._device) % NUM_QUERIES

    def packed(self, ring: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Queries of positions [first, end) as they are held: codes int8 [layers, end - first, Hq, D], scales float32 [layers, end - first,
        Hq]."""
        assert self._held is not None
        places = self._places(first, end)
        codes, scales = (x[ring][:, places] for x in self._held)
        return codes, scales

    def restore(self, ring: int, first: int, codes: Tensor, scales: Tensor) -> None:
        """Hold what `packed` gave, from position `first` on."""
        places = self._places(first, first + codes.shape[1])
        for held, x in zip(self._grow(codes), (codes, scales), strict=True):
            held[ring][:, places] = x.to(self._device)
