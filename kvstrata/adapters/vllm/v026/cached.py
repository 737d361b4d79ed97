"""Pages in the engine's prefix cache: which blocks of its pool are which page, and what they give up when the pool runs short.

The engine's hash map holds a page's first frame under the page's hash. The others carry private hashes that are in no map: a block without
a hash would go to the front of the free queue, and be lost before its page is.

A page is found only if every one of its blocks still carries the hash that it was given; else its first block is evicted too. Without
ageing the engine's free queue decides what is lost: the least recently released request, its last page first. With ageing, blocks that are
to be handed out are cleared before: the last planes of a page that nobody holds, which is then found at a lower tier, or a whole page, the
next in the engine's order, whichever is worth less (ageing.py). Nothing that a request holds is ever touched.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from kvstrata.adapters.vllm.ageing import HALF_LIFE, OLDEST, Losses, Queue, Worth
from kvstrata.types import Tier


@dataclass(eq=False, slots=True)
class BlockPage:
    """blocks: its frames, in the order of ops/frame.py. planned: the tier that it was written at. losses: where pages age.
    keys: the hash each block was given when the page was registered. cached: whether none of them was handed out since.
    age: requests that have held it and ended. since: half-lives that had passed when it was last let go of."""

    tier: Tier
    blocks: list[KVCacheBlock]
    planned: Tier
    losses: Losses = ()
    keys: list[bytes] = field(default_factory=list)
    cached: bool = False
    age: int = 0
    since: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether it is registered, and all of its blocks are still its own."""
        return len(self.keys) == len(self.blocks) and all(b.block_hash == key for b, key in zip(self.blocks, self.keys, strict=True))

    @property
    def is_free(self) -> bool:
        return self.blocks[0].ref_cnt == 0


class CachedPages:
    def __init__(self, pool: Any, group_id: int, frames: dict[Tier, int], worth: Worth | None) -> None:
        self.pool, self._group_id, self._worth = pool, group_id, worth
        self._frames = {Tier.EVICTED: 0, **frames}
        self.broken = 0
        """Pages that were found with a frame gone."""
        self.demoted = 0
        """Times that a page gave up planes."""
        self.dropped = 0
        """Pages that were lost, for their frames were wanted."""
        self.by_tier = dict.fromkeys(frames, 0)
        """Pages that can be found, those that requests hold among them."""
        self._owner: dict[int, BlockPage] = {}
        self._queue: Queue[BlockPage] = Queue()
        self._serial = count()
        self._half_lives = 0.0
        self._half_life = HALF_LIFE * pool.num_gpu_blocks

    # in and out

    def register(self, pages: Sequence[BlockPage]) -> None:
        """Pages whose first block the engine has just given the page's hash."""
        for page in pages:
            base, *others = page.blocks
            page.keys = [base.block_hash]
            for block in others:
                key = make_block_hash_with_group_id(b"frame" + next(self._serial).to_bytes(8, "big"), self._group_id)
                block.set_block_hash(key, num_tokens=base.block_hash_num_tokens)
                page.keys.append(key)
            self._owner.update((b.block_id, page) for b in page.blocks)
            page.cached = True
            self.by_tier[page.tier] += 1
            self._half_lives += len(page.blocks) / self._half_life

    def find(self, block_hash: Any) -> BlockPage | None:
        while (found := self.pool.get_cached_block(block_hash, [self._group_id])) is not None:
            page = self._owner.get(found[0].block_id)
            if page is not None and page.whole:
                return page
            # another request may have left a whole page under the same hash
            self.broken += 1
            self.pool.evict_blocks({found[0].block_id})
        return None

    def of(self, blocks: Sequence[KVCacheBlock]) -> list[BlockPage]:
        """The pages whose blocks these are, one after another."""
        pages: list[BlockPage] = []
        at = 0
        while at < len(blocks):
            pages.append(self._owner[blocks[at].block_id])
            at += len(pages[-1].blocks)
        return pages

    def hold(self, pages: Sequence[BlockPage]) -> None:
        """A request takes these pages from the cache."""
        for page in pages:
            self.pool.touch(page.blocks)
            self._queue.remove(page)

    def release(self, pages: Sequence[BlockPage], *, ended: bool) -> None:
        """A request is about to let go of these pages; those that no other holds age from now on. ended: it does not come back."""
        for page in pages:
            page.age = min(page.age + ended, OLDEST)
            if page.cached and page.blocks[0].ref_cnt == 1:
                page.since = self._half_lives
                self._enqueue(page)

    def take(self, n: int) -> list[KVCacheBlock]:
        """n blocks for new frames."""
        if self._worth is not None:
            self._make_room(self._worth, n)
        blocks: list[KVCacheBlock] = self.pool.get_new_blocks(n)
        for block in blocks:
            page = self._owner.pop(block.block_id, None)
            if page is not None and page.cached:
                self._lose(page)
        return blocks

    def clear(self) -> None:
        """The engine has forgotten all that it had cached."""
        for page in self._owner.values():
            page.cached = False
        self._owner.clear()
        self._queue.clear()
        self.by_tier = dict.fromkeys(self.by_tier, 0)

    # ageing

    def fit(self, pages: Sequence[BlockPage], excess: int) -> None:
        """A request that has found these pages is `excess` blocks too large for the pool: the planes that are worth least are given up, if
        it fits then."""
        worth = self._worth
        free = [p for p in pages if p.is_free and p.tier is not Tier.BF16]
        if worth is None or excess <= 0 or excess > sum(max(0, self._frames[p.tier] - self._frames[worth.floor]) for p in free):
            return
        steps: list[tuple[float, int, Tier]] = []

        def push(i: int) -> None:
            step = worth.step(free[i].losses, free[i].age, free[i].tier)
            if step is not None:
                heapq.heappush(steps, (step.price, i, step.tier))

        for i in range(len(free)):
            push(i)
        while excess > 0:
            _, i, tier = heapq.heappop(steps)
            given = self._give_up(free[i], tier)
            self.pool.free_block_queue.prepend_n(given)
            self._enqueue(free[i])
            excess -= len(given)
            push(i)

    def _make_room(self, worth: Worth, n: int) -> None:
        """Let the first n blocks of the free queue be ones that no cached page has."""
        queue = self.pool.free_block_queue
        last, bare = queue.fake_free_list_head, 0
        while bare < n and last.next_free_block is not queue.fake_free_list_tail and last.next_free_block.block_hash is None:
            last, bare = last.next_free_block, bare + 1
        given: list[KVCacheBlock] = []
        while bare + len(given) < n and last.next_free_block is not queue.fake_free_list_tail:
            front = last.next_free_block
            page = self._owner.get(front.block_id)
            if page is None or not page.cached:
                # of a page that was broken or forgotten
                queue.remove(front)
                self.pool.evict_blocks({front.block_id})
                given.append(front)
                continue
            first = self._queue.first()
            if first is not None and first[0] < self._worth_now(worth, page):
                given += self._give_up(first[1], first[2])
                self._enqueue(first[1])
            else:
                given += self._give_up(page, Tier.EVICTED)
        queue.prepend_n(given)

    def _worth_now(self, worth: Worth, page: BlockPage) -> float:
        return worth.whole(page.losses, page.age, page.tier) + page.since

    def _enqueue(self, page: BlockPage) -> None:
        """Let a page that nobody holds offer its next step down."""
        self._queue.remove(page)
        if self._worth is None:
            return
        step = self._worth.step(page.losses, page.age, page.tier)
        if step is not None:
            self._queue.add(page, step.price + page.since, step.tier)

    def _give_up(self, page: BlockPage, tier: Tier) -> list[KVCacheBlock]:
        """Take a free page's last blocks out of the cache and of the queue; what is left is the page at `tier`."""
        n = self._frames[tier]
        given = page.blocks[n:]
        for block in given:
            del self._owner[block.block_id]
            self.pool.free_block_queue.remove(block)
        self.pool.evict_blocks({b.block_id for b in given})
        if tier is Tier.EVICTED:
            self._lose(page)
            return given
        del page.blocks[n:], page.keys[n:]
        self.by_tier[page.tier] -= 1
        self.by_tier[tier] += 1
        page.tier = tier
        self.demoted += 1
        return given

    def _lose(self, page: BlockPage) -> None:
        page.cached = False
        self.dropped += 1
        self.by_tier[page.tier] -= 1
        self._queue.remove(page)

    def check_integrity(self) -> None:
        pages = {id(p): p for p in self._owner.values()}.values()
        assert all(p.cached == p.whole for p in pages), "a page is taken for whole, or is not"
        cached = [p for p in pages if p.whole]
        blocks = [b.block_id for p in cached for b in p.blocks]
        assert len(blocks) == len(set(blocks)) and all(len(p.blocks) == self._frames[p.tier] for p in cached)
        assert self.by_tier == {t: sum(p.tier is t for p in cached) for t in self.by_tier}
        assert all(p.whole and p.is_free for p in self._queue), "a page that is held, or lost, may give up planes"
