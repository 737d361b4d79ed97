"""Which blocks of the engine's pool are which frames. One prefix hash names one page, which owns as many blocks as its tier has frames.

Invariants, which check_integrity looks at:
  1. free + held = all blocks but the null block; a block's ref_cnt is how many requests hold its page.
  2. A page is found only while all of its frames are its own (cached.py).
  3. A request's blocks are its pages' and its ring's, and the ring's are its own.
  4. A request's pages are at their planned tiers, or lower where it found them demoted: it never holds more than its plan.
Rows are append-only: nothing that a request holds is ever exchanged, so a worker's row cannot go stale.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from kvstrata.adapters.vllm.ageing import Worth
from kvstrata.adapters.vllm.delta import NewPage, RequestDelta
from kvstrata.adapters.vllm.geometry import stored_pages
from kvstrata.adapters.vllm.v026.cached import BlockPage, CachedPages
from kvstrata.adapters.vllm.v026.spec import FrameSpec
from kvstrata.types import PAGE_SIZE, Tier


@dataclass(eq=False, slots=True)
class Holding:
    """What one request holds. told: pages that the workers know of; -1: nothing yet, not even the ring. ended: it will not come back."""

    pages: list[BlockPage] = field(default_factory=list)
    ring: list[KVCacheBlock] = field(default_factory=list)
    told: int = -1
    ended: bool = False


class FrameManager(FullAttentionManager):
    kv_cache_spec: FrameSpec

    def __init__(self, kv_cache_spec: FrameSpec, block_pool: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, **kwargs)
        self.group = kv_cache_spec.settings.group
        self.frames = kv_cache_spec.frames()
        self.ring_frames = self.group // PAGE_SIZE * self.frames[Tier.BF16]
        self.holdings: dict[str, Holding] = {}
        self.found_pages = 0
        """Pages that requests took from the cache."""
        settings = kv_cache_spec.settings
        self.worth = None if settings.ageing is None else Worth(settings, kv_cache_spec.layout)
        self.cached = CachedPages(block_pool, self.kv_cache_group_id, self.frames, self.worth)
        self._requests: dict[str, Any] = {}
        self._plans: Any = None

    def lend(self, requests: dict[str, Any], plans: Any) -> None:
        """The scheduler's requests and their plans: the engine gives a manager ids alone."""
        self._requests, self._plans = requests, plans

    # how many blocks

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], total_computed_tokens: int,
        num_local_computed_tokens: int, num_tokens_main_model: int, apply_admission_cap: bool = False,
    ) -> int:  # fmt: skip
        holding = self.holdings.get(request_id)
        have = len(holding.pages) if holding else len(self.cached.of(new_computed_blocks))
        stored = stored_pages(num_tokens, self.group)
        need = sum(self.frames[t] for t in self._tiers(request_id, stored)[have:stored])
        ring = 0 if holding is not None and holding.ring else self.ring_frames
        return need + ring + self._get_num_evictable_blocks(new_computed_blocks)

    def _tiers(self, request_id: str, num_pages: int) -> list[Tier]:
        tiers: list[Tier] = self._plans.tiers(self._requests[request_id], num_pages)
        return tiers

    # taking them

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:  # fmt: skip
        assert request_id not in self.holdings and not num_external_computed_tokens
        pages = self.cached.of(new_computed_blocks)
        assert num_local_computed_tokens == len(pages) * PAGE_SIZE and num_local_computed_tokens % self.group == 0
        assert [p.planned for p in pages] == self._tiers(request_id, len(pages))[: len(pages)], "a found page was planned otherwise"
        self.cached.hold(pages)
        self.holdings[request_id] = Holding(pages)
        self.req_to_blocks[request_id] += new_computed_blocks
        self.num_cached_block[request_id] = len(pages)
        self.found_pages += len(pages)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        holding = self.holdings.setdefault(request_id, Holding())
        new: list[KVCacheBlock] = []
        if not holding.ring:
            holding.ring = self.cached.take(self.ring_frames)
            new += holding.ring
        stored = stored_pages(num_tokens, self.group)
        for tier in self._tiers(request_id, stored)[len(holding.pages) : stored]:
            losses = self._plans.losses(request_id, len(holding.pages))
            holding.pages.append(BlockPage(tier, self.cached.take(self.frames[tier]), tier, losses))
            new += holding.pages[-1].blocks
        self.req_to_blocks[request_id] += new
        return new

    def take_delta(self, request_id: str, computed: int) -> RequestDelta:
        """What the workers do not know yet of a request that has `computed` tokens before this step."""
        holding = self.holdings[request_id]
        first, ring = holding.told, None
        if first < 0:
            first, ring = 0, tuple(b.block_id for b in holding.ring)
        pages = tuple(NewPage(int(p.tier), tuple(b.block_id for b in p.blocks)) for p in holding.pages[first:])
        holding.told = len(holding.pages)
        return RequestDelta(computed, first, pages, ring)

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None) -> None:
        """Nothing is given back while a request runs."""

    def ends(self, request_id: str) -> None:
        """The request is about to be freed, and not because it is preempted."""
        if request_id in self.holdings:
            self.holdings[request_id].ended = True

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        holding = self.holdings.pop(request_id, None)
        if holding is not None:
            self.cached.release(holding.pages, ended=holding.ended)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks

    # finding them again

    def cache_blocks(self, request: Any, num_tokens: int, retention_interval: int | None = None) -> None:
        """Register the pages that have frames: this step writes what is not written yet, before anything is read."""
        request_id = request.request_id
        pages = self.holdings[request_id].pages
        first, last = self.num_cached_block.get(request_id, 0), min(len(pages), num_tokens // PAGE_SIZE)
        if first >= last:
            return
        self.block_pool.cache_full_blocks(request, [p.blocks[0] for p in pages], first, last, PAGE_SIZE, self.kv_cache_group_id)
        self.cached.register(pages[first:last])
        self.num_cached_block[request_id] = last

    # the engine's is a classmethod, but it is called on the instance
    def find_longest_cache_hit(self, block_hashes: Any, max_length: int, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        pages: list[BlockPage] = []
        for block_hash in block_hashes[: max_length // PAGE_SIZE]:
            page = self.cached.find(block_hash)
            if page is None:
                break
            pages.append(page)
        # only whole groups: what a query sees of its own group is in BF16
        del pages[len(pages) // (self.group // PAGE_SIZE) * (self.group // PAGE_SIZE) :]
        if self.worth is not None:
            self._fit(pages, max_length + 1)
        return ([b for page in pages for b in page.blocks],), len(pages) * PAGE_SIZE

    def _fit(self, found: list[BlockPage], num_tokens: int) -> None:
        """Let found pages give up planes where a request of so many tokens would have to wait for frames otherwise."""
        rest = self.kv_cache_spec.max_frames(num_tokens) - sum(self.frames[p.planned] for p in found)
        taken = sum(len(p.blocks) for p in found if p.is_free)
        self.cached.fit(found, taken + max(0, rest) - self.block_pool.get_num_free_blocks())

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """None: rows are not a block a page, so cascade attention cannot read them."""
        return 0

    # what is there

    @property
    def tokens_by_tier(self) -> dict[Tier, int]:
        """Tokens of running requests' settled pages, by tier; a page that several share counts once for each."""
        counts = dict.fromkeys(self.frames, 0)
        for holding in self.holdings.values():
            for page in holding.pages:
                counts[page.tier] += PAGE_SIZE
        return counts

    def check_integrity(self) -> dict[str, int]:
        """Assert the invariants; -> blocks that are free, held, cached (by whole pages), and all but the null block."""
        pool = self.block_pool
        free = {b.block_id for b in pool.free_block_queue.get_all_free_blocks()}
        refs: dict[int, int] = {}
        rings: set[int] = set()
        for request_id, holding in self.holdings.items():
            blocks = [b.block_id for p in holding.pages for b in p.blocks] + [b.block_id for b in holding.ring]
            assert sorted(blocks) == sorted(b.block_id for b in self.req_to_blocks[request_id]), "a row holds other blocks than its pages"
            for i in blocks:
                refs[i] = refs.get(i, 0) + 1
            rings |= {b.block_id for b in holding.ring}
        assert all(refs[i] == 1 for i in rings), "a ring is shared"
        assert set(self.req_to_blocks) >= set(self.holdings) and not any(
            self.req_to_blocks[i] for i in self.req_to_blocks.keys() - self.holdings
        )
        assert len(free) == pool.get_num_free_blocks()
        assert not free & refs.keys() and len(free) + len(refs) == pool.num_gpu_blocks - 1, "a block leaked"
        for block in pool.blocks[1:]:
            assert block.ref_cnt == refs.get(block.block_id, 0), (block, refs.get(block.block_id, 0))
        self.cached.check_integrity()
        cached = sum(self.frames[tier] * pages for tier, pages in self.cached.by_tier.items())
        return {"free": len(free), "held": len(refs), "cached": cached, "total": pool.num_gpu_blocks - 1}
