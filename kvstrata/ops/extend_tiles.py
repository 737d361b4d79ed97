"""How a ragged chunk is cut into tiles, for both kernels of `extend`. Knows nothing of either."""

import itertools


def tiles(cu_seqlens: list[int], per_tile: int, rows_per_token: int = 1) -> list[tuple[int, int, int, int]]:
    """(sequence, its first token, its tokens, first row of the tile) of tiles of `per_tile` rows, the longest first: the last rows of a
    chunk see most of it, and of sequences that are pieces of one prompt the later see more pages."""
    out = [
        (b, start, end - start, first)
        for b, (start, end) in enumerate(itertools.pairwise(cu_seqlens))
        for first in range(0, (end - start) * rows_per_token, per_tile)
    ]
    return sorted(out, key=lambda tile: (-tile[3], -tile[0]))
