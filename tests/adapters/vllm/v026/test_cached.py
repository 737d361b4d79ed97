"""The books of cached pages beside the engine's own pool of blocks, without an engine: whatever is done in whatever order."""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool

from kvstrata.adapters.vllm.ageing import Worth
from kvstrata.adapters.vllm.settings import EngineSettings
from kvstrata.adapters.vllm.v026.cached import BlockPage, CachedPages
from kvstrata.types import Tier

SETTINGS = EngineSettings.from_dict({"budget_bits": 4.0, "ageing": "INT2"})
LAYOUT = SETTINGS.layout(2, 64)
FRAMES = {t: LAYOUT.frames(t) for t in LAYOUT.tiers if t}
TIERS = (Tier.INT4, Tier.INT8, Tier.INT3, Tier.INT2, Tier.INT8)


class Pool:
    """Conversations of some pages each, over a pool of so many blocks; a turn finds pages, takes others, and lets go of all."""

    def __init__(self, blocks: int, *, ageing: bool) -> None:
        self.worth = Worth(SETTINGS, LAYOUT) if ageing else None
        self.blocks = BlockPool(blocks, True, 32)
        self.cached = CachedPages(self.blocks, 0, FRAMES, self.worth)

    def find(self, name: int, pages: int) -> list[BlockPage]:
        found: list[BlockPage] = []
        while len(found) < pages and (page := self.cached.find(hash_of(name, len(found)))) is not None:
            found.append(page)
        return found

    def begin(self, name: int, pages: int) -> tuple[list[BlockPage], int]:
        """-> the turn's pages, and how many of them were found."""
        found = self.find(name, pages)
        self.cached.hold(found)
        held = list(found)
        for i in range(len(found), pages):
            tier = TIERS[(name + i) % len(TIERS)] if i else Tier.BF16
            held.append(BlockPage(tier, self.cached.take(FRAMES[tier]), tier, self.worth.losses(None) if self.worth else ()))
        request = SimpleNamespace(block_hashes=[hash_of(name, i) for i in range(pages)])
        self.blocks.cache_full_blocks(request, [p.blocks[0] for p in held], len(found), pages, 32, 0)
        self.cached.register(held[len(found) :])
        return held, len(found)

    def end(self, pages: list[BlockPage], *, ended: bool = True) -> None:
        self.cached.release(pages, ended=ended)
        self.blocks.free_blocks(b for p in reversed(pages) for b in reversed(p.blocks))

    def turn(self, name: int, pages: int) -> int:
        held, found = self.begin(name, pages)
        self.end(held)
        return found


def hash_of(name: int, page: int) -> bytes:
    return b"%16d%16d" % (name, page)


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(160, ageing=True)
        self.held: dict[int, tuple[list[BlockPage], list[tuple[Tier, list[int]]]]] = {}

    @rule(name=st.integers(0, 5), pages=st.integers(1, 6))
    def begins(self, name: int, pages: int) -> None:
        free = self.pool.blocks.get_num_free_blocks()
        if name in self.held or free < 14 + 8 * pages:
            return
        held, _ = self.pool.begin(name, pages)
        self.held[name] = held, [(p.tier, [b.block_id for b in p.blocks]) for p in held]

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0, 5), ended=st.booleans())
    def ends(self, i: int, ended: bool) -> None:
        name = sorted(self.held)[i % len(self.held)]
        self.pool.end(self.held.pop(name)[0], ended=ended)

    @rule(name=st.integers(0, 5), excess=st.integers(0, 20))
    def is_made_to_fit(self, name: int, excess: int) -> None:
        found = self.pool.find(name, 6)
        before = [len(p.blocks) for p in found]
        could = sum(len(p.blocks) - 2 for p in found if p.is_free and p.tier is not Tier.BF16)
        self.pool.cached.fit(found, excess)
        given = sum(before) - sum(len(p.blocks) for p in found)
        assert given >= excess if excess <= could else given == 0

    @rule()
    def is_reset(self) -> None:
        if not self.held and self.pool.blocks.reset_prefix_cache():
            self.pool.cached.clear()

    @invariant()
    def books_are_right(self) -> None:
        self.pool.cached.check_integrity()
        assert self.pool.cached.broken == 0
        for pages, was in self.held.values():
            assert [(p.tier, [b.block_id for b in p.blocks]) for p in pages] == was, "what is held stays as it is"
        held = {b.block_id for pages, _ in self.held.values() for p in pages for b in p.blocks}
        free = {b.block_id for b in self.pool.blocks.free_block_queue.get_all_free_blocks()}
        assert not held & free and len(held) + len(free) == self.pool.blocks.num_gpu_blocks - 1


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def rounds(pool: Pool, conversations: int, strangers: int = 0) -> list[float]:
    """Share of pages found by round, of conversations of ten pages that take turns, with so many others between that never come again."""
    out, stranger = [], conversations
    for _ in range(6):
        found = 0
        for name in range(conversations):
            found += pool.turn(name, 10)
            for _ in range(strangers):
                stranger += 1
                pool.turn(stranger, 10)
        out.append(found / conversations / 10)
        pool.cached.check_integrity()
    return out


@pytest.mark.parametrize("blocks", [1900, 2200])
def test_conversations_that_take_turns_are_found_where_they_were_lost(blocks: int) -> None:
    # forty conversations of about 60 frames; least recently used ones go first, which is always the next to come
    assert rounds(Pool(blocks, ageing=False), 40)[-1] == 0
    assert rounds(Pool(blocks, ageing=True), 40)[-1] == 1


def test_a_lost_page_ends_what_is_found_and_what_lies_behind_it_serves_none_in_its_stead() -> None:
    """A page behind a gap saw what is gone: it is found again only once the gap is filled by the same tokens, and then by its own hash."""
    pool = Pool(400, ageing=True)
    pool.turn(1, 6)
    third = pool.find(1, 6)[2]
    pool.blocks.free_block_queue.prepend_n(pool.cached._give_up(third, Tier.EVICTED))
    pool.cached.check_integrity()
    assert len(pool.find(1, 6)) == 2 and pool.turn(2, 6) == 0
    assert pool.turn(1, 6) == 2 and len(pool.find(1, 6)) == 6


def test_what_does_not_fit_at_the_floor_either_is_lost() -> None:
    pool = Pool(600, ageing=True)
    assert rounds(pool, 40)[-1] == 0 and pool.cached.dropped > 1000


def test_the_longer_ago_the_coarser_and_then_gone() -> None:
    pool = Pool(4000, ageing=True)
    # a hundred and fifty conversations that never come again, among five that do
    assert rounds(pool, 5, strangers=5)[-1] == 1 and pool.cached.dropped > 0
    left = [[p for p in pool.find(name, 10) if p.tier is not Tier.BF16] for name in range(5 + 149, 5, -1)]
    there = [bool(pages) for pages in left]
    bits = [sum(p.tier for pages in left[i : i + 10] for p in pages) / (sum(map(len, left[i : i + 10])) or 1) for i in range(0, 140, 10)]
    print([f"{b:.2f}" for b in bits], sum(there))
    assert bits == sorted(bits, reverse=True) and bits[0] > 3 and 2 in bits and bits[-1] == 0
    assert there == sorted(there, reverse=True)
