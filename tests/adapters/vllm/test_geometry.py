"""What a step writes where: every position once, every page once, in any cutting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.adapters.vllm.geometry import Chunk, settled_pages, stored_pages
from kvstrata.types import PAGE_SIZE

groups = st.sampled_from([32, 64, 128])


@given(groups, st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_pages_settle_once_in_order_before_a_query_needs_them(group: int, steps: list[int]) -> None:
    start, stored = 0, 0
    for n in steps:
        # what the last step completed, then what this one completes
        stored = max(stored, settled_pages(start, group))
        chunk = Chunk(0, start, start + n, group)
        assert chunk.completes.start == stored or not chunk.completes
        assert [*chunk.from_ring, *chunk.whole] == list(chunk.completes)
        stored = max(stored, chunk.completes.stop if chunk.completes else 0)
        assert stored == stored_pages(start + n, group)
        for piece in chunk.pieces:
            assert piece.settled == settled_pages(piece.start, group) == settled_pages(piece.end - 1, group) <= stored
            assert piece.settled * PAGE_SIZE + piece.ring == piece.start
        start += n


@given(groups, st.integers(0, 300), st.integers(1, 300))
def test_every_token_is_in_a_page_or_in_the_ring(group: int, start: int, n: int) -> None:
    chunk = Chunk(7, start, start + n, group)
    assert [p.start for p in chunk.pieces] == [start, *[p.end for p in chunk.pieces][:-1]] and chunk.pieces[-1].end == start + n
    assert [p.row - 7 for p in chunk.pieces] == [p.start - start for p in chunk.pieces]
    whole = [t for page in chunk.whole for t in range(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)]
    assert all(start <= t < start + n for t in whole)
    written = [*chunk.to_ring_first, *whole, *chunk.to_ring_last]
    assert sorted(written) == list(range(start, start + n))
    # the ring has room for what comes last
    assert len(chunk.to_ring_last) <= group


@pytest.mark.parametrize(("num_tokens", "stored"), [(0, 0), (1, 0), (64, 0), (65, 2), (128, 2), (129, 4)])
def test_the_last_query_decides_what_is_stored(num_tokens: int, stored: int) -> None:
    assert stored_pages(num_tokens, 64) == stored
