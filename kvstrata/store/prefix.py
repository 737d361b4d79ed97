"""Reuse of settled pages across sequences: chained keys, matched page by page, evicted least recently used first.

Identity is logical: a key chains (parent key, token ids, codec), and neither where the bytes lie nor how many planes are left
enters it. Knows nothing of sequences.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence as Seq

import numpy as np

from kvstrata.store.arena import Arena
from kvstrata.store.page import Page
from kvstrata.types import Tier


def page_key(parent: bytes, token_ids: Seq[int], codec: str, salt: bytes = b"") -> bytes:
    """Key of a page that follows `parent` (b"" for the first). `salt`: the session's eviction epoch, where there is one."""
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(np.asarray(token_ids, dtype=np.int64).tobytes())
    digest.update(codec.encode() + b"\0" + salt)
    return digest.digest()


class PrefixIndex:
    """Settled pages by key. The index holds one reference to each frame of its pages."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        self.lookups = 0
        self.hits = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def frames(self) -> int:
        return sum(len(page.frames) for page in self._pages.values())

    def pages(self) -> list[Page]:
        return list(self._pages.values())

    def match(self, keys: Seq[bytes], min_tier: Tier = Tier.EVICTED) -> list[Page]:
        """The longest run of leading keys that are here, at `min_tier` or above."""
        found: list[Page] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None or page.tier < min_tier:
                break
            found.append(page)
        self.lookups += len(keys)
        self.hits += len(found)
        # the deepest page is touched first, so that a chain loses its end before its beginning
        for key in reversed(keys[: len(found)]):
            self._pages.move_to_end(key)
        return found

    def insert(self, key: bytes, page: Page) -> None:
        """Keep `page` for others. A page that is here already stays, unless the new one has more planes."""
        known = self._pages.get(key)
        if known is not None:
            if known.tier >= page.tier:
                return
            self._arena.release(known.frames)
        self._arena.retain(page.frames)
        self._pages[key] = page
        self._pages.move_to_end(key, last=known is None)

    def reclaimable(self) -> int:
        """Frames that nobody but the index holds."""
        return sum(int(self._arena.ref_counts[i] == 1) for page in self._pages.values() for i in page.frames)

    def evict(self, frames: int) -> int:
        """Give up least recently used pages that no sequence holds until `frames` frames became free; returns how many did."""
        freed = 0
        for key, page in list(self._pages.items()):
            if freed >= frames:
                break
            # a page whose user has dropped some planes counts too: the user keeps what it holds
            if any(self._arena.ref_counts[i] == 1 for i in page.frames):
                del self._pages[key]
                freed += self._arena.release(page.frames)
        return freed

    def clear(self) -> int:
        freed = sum(self._arena.release(page.frames) for page in self._pages.values())
        self._pages.clear()
        return freed
