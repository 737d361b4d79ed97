"""Tokens picked out of pages into pages of their own, each layer and KV head its own: anchors. Knows nothing of why they were picked."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstrata.types import PAGE_SIZE, Tier

EMPTY = -1
"""Position of a slot that holds nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A page of picked tokens. positions int32 [layers, KV heads, 32]: of the token in each slot of each head, or EMPTY. Attention does
    not care for their order; slots are filled from the most wanted token on. whole: bool of the same shape, whether the token was picked
    while its K and V were at hand in full precision; others were made of planes, and what those had lost stays lost."""

    tier: Tier
    frames: tuple[int, ...]
    positions: NDArray[np.int32]
    whole: NDArray[np.bool_]

    @property
    def tokens(self) -> int:
        """Over layers and heads."""
        return int((self.positions != EMPTY).sum())

    @property
    def promoted(self) -> int:
        """Tokens, over layers and heads, that were made of planes."""
        return self.tokens - int(self.whole.sum())

    @property
    def live(self) -> NDArray[np.uint32]:
        """Live masks [layers, KV heads], bit j = slot j."""
        bits = (self.positions != EMPTY).astype(np.uint32) << np.arange(PAGE_SIZE, dtype=np.uint32)
        return np.bitwise_or.reduce(bits, axis=-1)


def picked_bits(pages: list[Gathered], num_pages: int) -> NDArray[np.uint32]:
    """Bits of the tokens that lie in `pages`, by the page that they come from: uint32 [num_pages, layers, KV heads]."""
    layers, heads, _ = pages[0].positions.shape
    out = np.zeros((num_pages, layers, heads), np.uint32)
    for page in pages:
        layer, head, slot = np.nonzero(page.positions != EMPTY)
        position = page.positions[layer, head, slot]
        np.bitwise_or.at(out, (position // PAGE_SIZE, layer, head), np.uint32(1) << (position % PAGE_SIZE).astype(np.uint32))
    return out


def keep(page: Gathered, kept: NDArray[np.bool_]) -> Gathered:
    """The page without tokens at positions that `kept` [positions] does not name."""
    inside = (page.positions != EMPTY) & (page.positions < len(kept))
    stays = inside & kept[np.where(inside, page.positions, 0)] if len(kept) else inside
    return Gathered(page.tier, page.frames, np.where(stays, page.positions, EMPTY).astype(np.int32), page.whole & stays)
