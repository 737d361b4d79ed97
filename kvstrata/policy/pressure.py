"""Who gives way, and by how much, when sequences of one arena need more frames than there are: the decision of mode `auto`, alone.

In this order: planes of everything but instructions, a tier at a time; planes of instructions; tokens of pages that are at the lowest tier
already, half of them at first; what lives on of such pages. Within each, observations first, instructions last, the current turn
after all others; of pages alike, those of the sequence that holds most frames a token, its oldest first. Nothing is ever given back, so no
page flaps. Knows no store: what a page is, and who else holds it, is told.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstrata.policy.role import CURRENT, GIVE_UP, MIN_TOKENS, RANK
from kvstrata.policy.triaxial import IS_INST
from kvstrata.types import Tier

THINNED = 0.5
"""Share of a page's tokens that lives on at first."""
PLANES, INSTRUCTIONS, TOKENS, SURVIVORS = range(4)
Key = tuple[int, int, int, int]
"""Kind of step, tier (the highest first), whether others hold the page too, rank."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a sequence holds. tiers: of its settled pages, EVICTED where one is gone. ranks: of each page, lower gives way sooner.
    kept: pages that lose planes but no token. shared: pages of which other sequences hold frames too. survivors: pages of what lives on of
    thinned ones. frames, tokens: of all that it holds."""

    tiers: tuple[Tier, ...]
    ranks: tuple[int, ...]
    kept: frozenset[int]
    shared: frozenset[int]
    tokens: int
    frames: int
    survivors: int = 0


@dataclass(slots=True)
class Concession:
    """tiers: new ones, by page. thinned: pages that are to lose tokens. survivors: pages that what lives on may take then, with those that
    there were."""

    tiers: dict[int, Tier] = field(default_factory=dict)
    thinned: list[int] = field(default_factory=list)
    survivors: int = 0


def rank_pages(counts: NDArray[np.int32]) -> tuple[tuple[int, ...], frozenset[int]]:
    """Ranks and kept pages by how many tokens of each tag pages hold (policy/tags.py): the order in which policy `role` gives up."""
    heard = counts >= np.minimum(MIN_TOKENS, counts.max(1, initial=0))[:, None]
    rank = np.where(heard, RANK, 0).max(1, initial=0) + len(GIVE_UP) * (heard & CURRENT).any(1)
    inst = (counts[:, IS_INST] > 0).any(1)
    # a page with one instruction in it is one of instructions
    rank = np.where(inst, 2 * len(GIVE_UP), rank)
    return tuple(rank.tolist()), frozenset(np.flatnonzero(inst).tolist())


def concede(holdings: Mapping[int, Holding], frames: Mapping[Tier, int], ladder: tuple[Tier, ...], short: int) -> dict[int, Concession]:
    """What each sequence gives up so that `short` frames become free, or all that there is where that is less.

    frames: of a page at each tier; ladder: quantized tiers, ascending. A page that others hold too counts for nothing: it takes all of
    them to free it."""
    given: dict[int, Concession] = {}
    held = {i: float(h.frames) for i, h in holdings.items()}
    lower = dict(zip(ladder[1:], ladder, strict=False))
    now = {i: list(h.tiers) for i, h in holdings.items()}
    pool = {i: float(h.survivors) for i, h in holdings.items()}
    # one queue a sequence, so that which sequence is next can be asked anew after each step
    queues = {i: _steps(h, lower, ladder[0]) for i, h in holdings.items()}
    for queue in queues.values():
        heapq.heapify(queue)
    freed = 0.0
    while freed < short:
        ready = [(queue[0][0], -held[i] / max(1, holdings[i].tokens), i) for i, queue in queues.items() if queue]
        if not ready:
            break
        _, _, i = min(ready)
        key, page = heapq.heappop(queues[i])
        h, mine, kind = holdings[i], given.setdefault(i, Concession(survivors=holdings[i].survivors)), key[0]
        gain = 0.0
        if kind in (PLANES, INSTRUCTIONS):
            before, after = now[i][page], lower[now[i][page]]
            now[i][page] = mine.tiers[page] = after
            gain = frames[before] - frames[after]
            if after in lower:
                heapq.heappush(queues[i], (_planes(h, page, after), page))
            elif page not in h.kept:
                heapq.heappush(queues[i], (_tokens(h, page), page))
        elif kind == TOKENS and page in h.shared:
            now[i][page] = mine.tiers[page] = Tier.EVICTED
            gain = frames[ladder[0]]
        elif kind == TOKENS:
            mine.thinned.append(page)
            pool[i] += THINNED
            gain = frames[ladder[0]] * (1 - THINNED)
            heapq.heappush(queues[i], ((SURVIVORS, 0, 0, 0), page))
        else:
            # of a page that was thinned just now half is left
            share = min(pool[i], THINNED if page >= 0 else 1.0)
            pool[i] -= share
            gain = frames[ladder[0]] * share
        held[i] -= gain
        freed += 0.0 if page in h.shared and kind != SURVIVORS else gain
        # a page that would not be full goes: what is to be thinned always yields something
        mine.survivors = int(pool[i])
    return given


def _steps(h: Holding, lower: Mapping[Tier, Tier], lowest: Tier) -> list[tuple[Key, int]]:
    """The first step of each page, and one for each page of survivors; pages of theirs are numbered below 0."""
    steps = [((SURVIVORS, 0, 0, 0), -1 - i) for i in range(h.survivors)]
    for page, tier in enumerate(h.tiers):
        if tier in lower:
            steps.append((_planes(h, page, tier), page))
        elif tier is lowest and page not in h.kept:
            steps.append((_tokens(h, page), page))
    return steps


def _planes(h: Holding, page: int, tier: Tier) -> Key:
    return (INSTRUCTIONS if page in h.kept else PLANES, -int(tier), int(page in h.shared), h.ranks[page])


def _tokens(h: Holding, page: int) -> Key:
    return (TOKENS, 0, int(page in h.shared), h.ranks[page])
