"""Room for a step when the arena has none: sequences whose owners agreed to yield give planes and tokens up (mode `auto`).

Knows who holds which frames; who is to give way, policy/pressure.py says.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvstrata.policy.pressure import Concession, Holding, concede
from kvstrata.store.page import Sequence
from kvstrata.types import PAGE_SIZE, Thinning, Tier

if TYPE_CHECKING:
    from kvstrata.store.store import Store

EXTRA = 32
"""A thirty-second of the arena is made free beyond what is wanted: sequences do not yield page by page."""


class Lender(Protocol):
    """Owner of a sequence that gives way under pressure."""

    def yields(self) -> tuple[int, tuple[int, ...], frozenset[int]] | None:
        """Its sequence, a rank for each of its pages (lower gives way sooner), and pages that lose no token; None: it holds nothing."""


def relieve(store: "Store", short: int) -> bool:
    """Let lenders give up what makes `short` frames free, and some more; whether anything was given up at all."""
    holdings = _holdings(store)
    frames = {tier: store.layout.frames(tier) for tier in store.layout.tiers}
    wanted = short + store.arena.num_frames // EXTRA
    given = concede(holdings, frames, store.layout.codec.tiers, wanted)
    before = [store.sequence(i).frames for i in given]
    for sequence_id, concession in given.items():
        _apply(store, store.sequence(sequence_id), holdings[sequence_id], concession)
    # planes that were given up may be kept for others still
    if given and store.arena.free < wanted:
        store.prefix.evict(wanted - store.arena.free)
    return before != [store.sequence(i).frames for i in given]


def make_room(store: "Store", n: int) -> None:
    """Let lenders give way until `n` frames can be had, or nothing more can be given up."""
    while store.arena.free + store.prefix.reclaimable() < n and relieve(store, n - store.arena.free):
        pass


def _holdings(store: "Store") -> Mapping[int, Holding]:
    told = [x for lender in store.lenders() if (x := lender.yields()) is not None]
    owners = Counter(frame for s in store.sequences for frames in s.held for frame in set(frames))
    # other codecs' pages are written anew when they are demoted, and one that others hold would need frames for that
    movable, out = store.layout.codec.name == "planes", {}
    for sequence_id, ranks, kept in told:
        s = store.sequence(sequence_id)
        pages = s.pages[: s.settled]
        shared = frozenset(p for p, page in enumerate(pages) if any(owners[i] > 1 for i in page.frames))
        tiers = tuple(page.tier if movable or p not in shared else Tier.BF16 for p, page in enumerate(pages))
        out[sequence_id] = Holding(tiers, ranks[: s.settled], kept, shared, s.num_tokens, s.frames, len(s.survivors))
    return out


def _apply(store: "Store", s: Sequence, holding: Holding, concession: Concession) -> None:
    tiers = [concession.tiers.get(p, tier) for p, tier in enumerate(holding.tiers)]
    lowest, thinning = store.layout.codec.tiers[0], None
    if concession.thinned or concession.survivors < holding.survivors:
        spared = frozenset(range(len(s.pages))) - set(concession.thinned)
        # survivors of a tier above the lowest are coarsened before they go
        tier = max((page.tier for page in s.survivors), default=lowest) if not concession.thinned else lowest
        thinning = Thinning(concession.survivors * PAGE_SIZE, concession.survivors, tier, spared, "newest")
    plan = replace(s.plan, tiers=(*tiers, *s.plan.tiers[len(tiers) :]), thinning=thinning)
    store.set_plan(s.id, plan)
