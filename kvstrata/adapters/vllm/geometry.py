"""Which tokens a query sees as settled pages, which in BF16; what a step writes where. Knows nothing of tensors or of any engine.

Tokens settle in aligned groups of G (a page, or the window). A query at position i sees the pages before its own group at their tiers, and
its own group up to itself in BF16: a function of positions alone, whatever the chunks, hits and preemptions were.

A request owns G / 32 dense pages, its ring: page p of the current group lies in slot p % (G / 32). A step over tokens [start, end):

    settled before it     pages of groups that ended at `start`: copied from the ring to their frames before the forward pass
    settled inside it     pages of groups that end before the last query's: written by each layer before it attends
    the rest              goes to the ring
"""

import itertools
from dataclasses import dataclass

from kvstrata.types import PAGE_SIZE


def settled_pages(position: int, group: int) -> int:
    """Pages that a query at `position` sees at their tiers."""
    return position // group * (group // PAGE_SIZE)


def stored_pages(num_tokens: int, group: int) -> int:
    """Pages that have frames once `num_tokens` tokens are computed: those that the last query saw."""
    return settled_pages(max(num_tokens - 1, 0), group)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) of a chunk, all of one group: they attend `settled` pages, `ring` tokens of the group that are in the ring, and
    each other. row: of the first of them in the batch."""

    row: int
    start: int
    end: int
    settled: int
    ring: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one request does in a step: tokens [start, end) that lie at rows [row, row + end - start) of the batch."""

    row: int
    start: int
    end: int
    group: int

    @property
    def pieces(self) -> list[Piece]:
        cuts = [self.start, *range((self.start // self.group + 1) * self.group, self.end, self.group), self.end]
        out = []
        for i, (a, b) in enumerate(itertools.pairwise(cuts)):
            settled = settled_pages(a, self.group)
            in_ring = a - settled * PAGE_SIZE if i == 0 else 0
            out.append(Piece(self.row + a - self.start, a, b, settled, in_ring))
        return out

    @property
    def completes(self) -> range:
        """Pages that settle inside the step."""
        return range(settled_pages(self.start, self.group), stored_pages(self.end, self.group))

    @property
    def from_ring(self) -> range:
        """Those of `completes` whose group had begun before the step, so that some of it is in the ring."""
        if self.start % self.group == 0 or not self.completes:
            return range(0)
        return range(self.completes.start, self.completes.start + self.group // PAGE_SIZE)

    @property
    def whole(self) -> range:
        """Those of `completes` that lie in the chunk as a whole."""
        return range(self.from_ring.stop or self.completes.start, self.completes.stop)

    @property
    def to_ring_first(self) -> range:
        """Positions whose tokens go to the ring before pages of their group are taken from it."""
        return range(self.start, self.from_ring.stop * PAGE_SIZE) if self.from_ring else range(0)

    @property
    def to_ring_last(self) -> range:
        """Positions whose tokens go to the ring once the chunk's queries have read it."""
        return range(max(self.start, stored_pages(self.end, self.group) * PAGE_SIZE), self.end)

    def row_of(self, position: int) -> int:
        return self.row + position - self.start
