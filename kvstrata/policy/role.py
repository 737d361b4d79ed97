"""Tiers by what a page holds, from a fixed table that can be read in one look. Looks at tags only: no calibration, no attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstrata.policy.budget import QUANTIZED, Budget, Signals, check_sinks, check_tiers, num_pages
from kvstrata.policy.tags import MODALITIES, ROLES, page_tags
from kvstrata.types import Age, Modality, Plan, Role, Span, Tier

INT2, INT3, INT4 = Tier.INT2, Tier.INT3, Tier.INT4
TABLE: dict[Role | Modality, tuple[Tier, Tier, Tier, Tier]] = {
    #                 current  m1    m2    older
    Role.DELIM:      (INT4, INT4, INT4, INT4),
    Role.TOOL_CALL:  (INT4, INT4, INT4, INT4),
    Role.USER:       (INT4, INT4, INT3, INT3),
    Role.ASSISTANT:  (INT4, INT4, INT3, INT3),
    Role.INST:       (INT3, INT3, INT3, INT3),
    Role.REASONING:  (INT4, INT3, INT2, INT2),
    Role.OBS:        (INT4, INT3, INT2, INT2),
    Modality.IMAGE:  (INT4, INT3, INT2, INT2),
}  # fmt: skip
"""Tier by age. Images have their own row, whatever their role."""
GIVE_UP = (Modality.IMAGE, Role.OBS, Role.REASONING, Role.ASSISTANT, Role.USER, Role.DELIM, Role.TOOL_CALL, Role.INST)
"""Who loses planes first, when the budget is short; within a role the oldest page first, and the current turn after all others."""
MIN_TOKENS = 4
"""Tokens of a tag that a page must hold for the tag to have a say: a stray delimiter does not raise a page of observations."""


_ROWS: list[tuple[Role | Modality, Age]] = [(m if m is Modality.IMAGE else r, a) for a in Age for m in MODALITIES for r in ROLES]
"""(row of TABLE, age) of each tag code (tags.py)."""
_WISH = np.array([TABLE[row][age] for row, age in _ROWS])
RANK = np.array([GIVE_UP.index(row) for row, _ in _ROWS])
_INST = np.array([row is Role.INST for row, _ in _ROWS])
# instructions have no age: they are never current
CURRENT = np.array([age is Age.CURRENT for _, age in _ROWS]) & ~_INST


@dataclass(frozen=True, slots=True)
class ByRole:
    """sinks: pages at the start that are BF16. tiers: what the codec has; where it lacks one of the table's, the next lower stands in."""

    name = "role"

    sinks: int = 1
    tiers: tuple[Tier, ...] = QUANTIZED

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", check_tiers(self.tiers))
        check_sinks(self.sinks)

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan:
        """The table. Under a budget first refinement planes go, then whole pages, both in GIVE_UP's order; instructions are never evicted.
        Raises ValueError below that floor."""
        pages = num_pages(num_tokens, budget)
        counts = page_tags(spans, num_tokens, signals.current_turn)
        heard = counts >= np.minimum(MIN_TOKENS, counts.max(1, initial=0))[:, None]
        tiers = [self._nearest(Tier(wish)) for wish in np.where(heard, _WISH, 0).max(1, initial=0).tolist()]
        tiers[: self.sinks] = [Tier.BF16] * min(self.sinks, pages)
        if budget is not None:
            self._degrade(tiers, counts, heard, budget)
        return Plan(tuple(tiers), self._nearest(Tier.INT4))

    def _nearest(self, wish: Tier) -> Tier:
        return max((t for t in self.tiers if t <= wish), default=self.tiers[0])

    def _degrade(self, tiers: list[Tier], counts: NDArray[np.int32], heard: NDArray[np.bool_], budget: Budget) -> None:
        """Lower `tiers` in place, one tier a round, until the plan fits."""
        body = budget.body(self.sinks)
        current = (heard & CURRENT).any(1)
        rank = np.where(heard, RANK, 0).max(1, initial=0)
        order = sorted(body, key=lambda page: (current[page], rank[page], page))
        kept = set(np.flatnonzero((counts * _INST).any(1)).tolist())
        if order and not kept and self.sinks == 0 and budget.window_pages == 0:
            # a sequence always keeps one living page
            kept = {order[-1]}
        lowest = self.tiers[0]
        floor = list(tiers)
        for page in body:
            floor[page] = lowest if page in kept else Tier.EVICTED
        budget.check(floor, self.name)
        lower = dict(zip(self.tiers[1:], self.tiers, strict=False))
        rounds = [lower] * (len(self.tiers) - 1) + [{lowest: Tier.EVICTED}]
        excess = budget.cost(tiers) - budget.limit
        for steps in rounds:
            for page in order:
                if excess <= 0:
                    return
                after = steps.get(tiers[page])
                if after is None or (after is Tier.EVICTED and page in kept):
                    continue
                excess -= budget.page_bytes(page, tiers[page]) - budget.page_bytes(page, after)
                tiers[page] = after
        assert excess <= 0
