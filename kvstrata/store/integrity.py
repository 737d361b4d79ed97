"""Whether a store's books agree: frames, references, pages, sequences. Changes nothing."""

from typing import TYPE_CHECKING

import numpy as np

from kvstrata.store.anchors import eligible
from kvstrata.store.contents import tokens_of
from kvstrata.store.gathered import EMPTY, Gathered, keep
from kvstrata.store.page import Page, Sequence
from kvstrata.types import PAGE_SIZE

if TYPE_CHECKING:
    from kvstrata.store.store import Store


def check_integrity(store: "Store", reserved: list[int], rings: list[int]) -> None:
    """reserved, rings: frames and rings of queries that an open step holds. Raises AssertionError where books disagree."""
    references = np.zeros(store.arena.num_frames, dtype=np.int32)
    pages: list[Page | Gathered] = [page for s in store.sequences for page in s.pages]
    pages += [page for s in store.sequences for page in (*s.anchors, *s.survivors)]
    for page in [*pages, *store.prefix.pages()]:
        assert len(page.frames) == store.layout.frames(page.tier), f"{page} has {len(page.frames)} frames"
        np.add.at(references, list(page.frames), 1)
    np.add.at(references, reserved, 1)
    store.arena.check_integrity(references)
    rings = [s.ring for s in store.sequences] + rings
    held = [rings.count(i) for i in range(len(store.queries.ref_counts))]
    assert held == store.queries.ref_counts, f"rings of queries are held {held} times, counted {store.queries.ref_counts}"
    for s in store.sequences:
        assert len(s.pages) == -(-s.num_tokens // PAGE_SIZE), f"sequence {s.id}: {len(s.pages)} pages for {s.num_tokens} tokens"
        assert len(s.keys) <= s.settled <= len(s.pages), f"sequence {s.id}: settled {s.settled}, keys {len(s.keys)}"
        live = eligible(s.pages[: s.settled])
        for page in s.anchors:
            assert np.array_equal(keep(page, live).positions, page.positions), f"sequence {s.id}: an anchor's token does not live"
        _check_survivors(store, s)


def _check_survivors(store: "Store", s: Sequence) -> None:
    there = np.zeros((store.config.num_layers, store.config.num_kv_heads, s.num_tokens), np.int64)
    for page in s.survivors:
        layer, head, slot = np.nonzero(page.positions != EMPTY)
        np.add.at(there, (layer, head, page.positions[layer, head, slot]), 1)
    for p, old in enumerate(s.pages):
        live = np.flatnonzero(tokens_of([old.live])[0][: s.num_tokens - p * PAGE_SIZE])
        there[:, :, p * PAGE_SIZE + live] += 1
    assert there.max(initial=0) <= 1, f"sequence {s.id}: a token lives twice"
