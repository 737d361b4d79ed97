"""What a session remembers of its own questions, by which its cache is thinned: IntentKV's QueryMemory (Li, Lou and Li 2026).

The paper's recurrence is M_t = e^-lambda M_(t-1) + Enc(q_t). Enc is not published. Here it maps the queries of a span to themselves, a
sum of point masses: M_t is a weighted set of queries, and a turn that ends multiplies all weights by e^-lambda (docs/intentkv.md has
what a mean query, which is what one vector could hold, does instead). Knows nothing of how tokens are scored by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.types import Ask

MOST_PER_ASK = 16
"""Queries remembered of one ask, evenly spread; its last token's always among them."""
MOST = 256
"""Queries remembered altogether; beyond, those of the oldest asks go, of each ask every other one first."""


MOST_ASKED = 64
"""Tokens of the newest ask whose K-vectors a residual head sees."""


def places(ask: Ask) -> list[int]:
    """Positions whose queries are remembered of an ask."""
    stride = -(-(ask.end - ask.start) // MOST_PER_ASK)
    return list(range(ask.end - 1, ask.start - 1, -stride))[::-1]


def newest_ask(asks: Sequence[Ask]) -> list[int]:
    """Positions of the newest turn's asks, the last MOST_ASKED."""
    newest = max((ask.turn for ask in asks), default=0)
    return [p for ask in asks if ask.turn == newest for p in range(ask.start, ask.end)][-MOST_ASKED:]


@dataclass(frozen=True, slots=True, eq=False)
class QueryMemory:
    """positions, turns: of the remembered queries, ascending. queries [E, layers, Hq, D], after RoPE at their positions. until: tokens of
    the sequence that were looked at, remembered or not."""

    positions: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    queries: Tensor | None = None
    until: int = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.queries is None else self.queries.nbytes

    def weights(self, decay: float) -> Tensor:
        """float32 [E]: e^(-decay * turns since). The newest remembered turn has weight 1."""
        turns = torch.tensor(self.turns, dtype=torch.float32)
        return torch.exp(-decay * (turns.max() - turns)) if len(turns) else turns

    def of(self, layer: int) -> Tensor:
        """[E, Hq, D]: one layer's queries."""
        assert self.queries is not None
        return self.queries[:, layer]

    def grown(self, positions: list[int], turns: list[int], queries: Tensor | None, until: int) -> "QueryMemory":
        """With more queries [n, layers, Hq, D], of later positions."""
        if not positions or queries is None:
            return QueryMemory(self.positions, self.turns, self.queries, until)
        queries = queries if self.queries is None else torch.cat([self.queries, queries])
        grown = QueryMemory((*self.positions, *positions), (*self.turns, *turns), queries, until)
        return grown if len(grown.positions) <= MOST else grown._only(_thinned(grown.turns))

    def cropped(self, num_tokens: int) -> "QueryMemory":
        """Without what came after `num_tokens` tokens."""
        if self.until <= num_tokens:
            return self
        kept = self._only([i for i, p in enumerate(self.positions) if p < num_tokens])
        return QueryMemory(kept.positions, kept.turns, kept.queries, num_tokens)

    def _only(self, kept: list[int]) -> "QueryMemory":
        # a memory without entries is one all the same: the tokens that it looked at held no ask
        queries = None if self.queries is None or not kept else self.queries[kept]
        return QueryMemory(tuple(self.positions[i] for i in kept), tuple(self.turns[i] for i in kept), queries, self.until)


def _thinned(turns: tuple[int, ...]) -> list[int]:
    """Indices of MOST entries: turns lose every other one, the oldest turn first, but never their last."""
    kept = list(range(len(turns)))
    while len(kept) > MOST:
        before = len(kept)
        for turn in sorted(set(turns)):
            of = [i for i in kept if turns[i] == turn]
            gone = set(of[-2::-2][: len(kept) - MOST])
            kept = [i for i in kept if i not in gone]
        if len(kept) == before:
            kept = kept[len(kept) - MOST :]
    return kept
