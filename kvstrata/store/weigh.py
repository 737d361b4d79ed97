"""What each page of a sequence is worth to the newest queries, by which the next plan takes planes away: Signals.mass.

Knows nothing of what a page loses at a tier, of tags or of budgets.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvstrata.ops.score import NUM_QUERIES
from kvstrata.ops.share import output_shares
from kvstrata.store.contents import Contents
from kvstrata.store.page import Sequence
from kvstrata.store.signals import by_intent
from kvstrata.types import PAGE_SIZE

if TYPE_CHECKING:
    from kvstrata.store.store import Store

STEPS = 12
"""Steps to a factor of two that weights are rounded to: sums of floats differ in their last bits from batch to batch, plans must not."""


def is_due(s: Sequence, new: int) -> bool:
    """Whether pages are weighed after a step of `new` tokens: when a turn begins, and every so many generated tokens."""
    weighing = s.plan.weighing
    return weighing is not None and (new > 1 or s.num_tokens - s.weighed_at >= weighing.refresh)


def weigh(store: "Store", s: Sequence) -> None:
    """Add what the newest queries say of each whole page to s.weights; earlier weights fade."""
    weighing, first = s.plan.weighing, max(s.queries_from, s.num_tokens - NUM_QUERIES)
    pages = s.num_tokens // PAGE_SIZE
    if weighing is None or not store.queries.holds(s.ring) or first >= s.num_tokens or not pages:
        return
    contents, total, aligned = Contents(store, s, s.num_tokens), torch.zeros(pages), torch.zeros(pages)
    thinning = s.plan.thinning if weighing.intent and s.memory.positions else None
    for layer in range(store.config.num_layers):
        keys, values, _, there = contents.read(layer, store.arena.buffer[layer])
        q = store.queries.read(layer, s.ring, first, s.num_tokens)
        shares = output_shares(q, keys, values, s.scale, there).sum(0)
        total += _by_page(shares, pages)
        if thinning is not None:
            aligned += _by_page(by_intent(store, s, thinning, layer, keys, there).sum(0), pages)
    newest = total.double().numpy()
    if thinning is not None:
        newest *= (rounded(aligned.double().numpy()) / max(float(aligned.double().mean()), 1e-30)) ** weighing.intent
    s.weights = rounded(newest + weighing.decay * pad_to(s.weights, pages))
    s.weighed_at = s.num_tokens


def _by_page(tokens: torch.Tensor, pages: int) -> torch.Tensor:
    """[n] -> sums of whole pages, [pages]."""
    return tokens[: pages * PAGE_SIZE].view(-1, PAGE_SIZE).sum(1).cpu()


def pad_to(weights: NDArray[np.float64], pages: int) -> NDArray[np.float64]:
    """Without what came after a crop, zeros for what is new."""
    kept = weights[:pages]
    return np.pad(kept, (0, pages - len(kept)))


def rounded(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp2(np.round(np.log2(np.maximum(weights, 1e-30)) * STEPS) / STEPS)
