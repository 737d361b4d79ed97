"""Sequences with anchors, fed by steps whose queries, keys and values are functions of the tokens alone."""

import functools
from typing import Any

import torch

from kvstrata.attend import attend
from kvstrata.ops.table import live_tokens
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Anchors, Plan, Tier
from tests.store.reference import D, H, L, end, kv

GROUP = 2
SCALE = 0.3


def plan(count: int = 5, tier: Tier = Tier.BF16, body: Tier = Tier.INT2, **how: Any) -> Plan:
    return Plan((Tier.BF16,), body, anchors=Anchors(count, tier, **how))


def queries(tokens: list[int], layer: int) -> torch.Tensor:
    return _query_table(layer)[torch.tensor(tokens, dtype=torch.int64) % 1000]


def feed(store: Store, sequence: int, tokens: list[int], *, commit: bool = True) -> list[torch.Tensor]:
    """Attention's output of each layer."""
    return feed_batch(store, [sequence], [tokens], commit=commit)


def generate(store: Store, sequence: int, token: int) -> None:
    """A step of decoding whose output nobody looks at."""
    step = store.begin([sequence], [[token]])
    for layer in range(L):
        step.write(layer, *kv([token], layer), queries([token], layer), SCALE)
    step.commit()


@functools.cache
def _query_table(layer: int) -> torch.Tensor:
    # multiples of 1/64 with a largest of 127/64: held without loss at eight bits, so what they choose compares exactly with what
    # exact queries choose. What rounding changes is test_queries.py's
    x = torch.randn(1000, H * GROUP, D, generator=torch.Generator().manual_seed(layer))
    return (x * (127 / x.abs().amax(-1, keepdim=True))).round() / 64


def feed_batch(store: Store, sequences: list[int], tokens: list[list[int]], *, commit: bool = True) -> list[torch.Tensor]:
    step = store.begin(sequences, tokens)
    flat = [t for row in tokens for t in row]
    out = []
    for layer in range(L):
        q, (k, v) = queries(flat, layer), kv(flat, layer)
        out.append(attend(store, step, layer, q, k, v, SCALE))
        step.write(layer, k, v, q, SCALE)
    end(store, step, commit)
    return out


def attended(store: Store, sequence: int, layer: int) -> torch.Tensor:
    """int [H, tokens]: how often each token is attended."""
    s = store.sequence(sequence)
    counts = torch.zeros(H, s.num_tokens + PAGE_SIZE, dtype=torch.int64)
    place = {page.frames: p for p, page in enumerate(s.pages) if page.frames}
    gathered = {page.frames: page for page in s.anchors}
    for segment in store.tables.build([s])[layer].segments:
        live = live_tokens(segment, H)[0]
        for row in range(int(segment.counts[0])):
            frames = tuple(segment.frames[0, row].tolist())
            for head in range(H):
                slots = live[row, head].nonzero()[:, 0]
                at = gathered[frames].positions[layer, head][slots.numpy()] if frames in gathered else place[frames] * PAGE_SIZE + slots
                counts[head, torch.as_tensor(at, dtype=torch.int64)] += 1
    return counts[:, : s.num_tokens]


def anchors_of(store: Store, sequence: int) -> list[list[list[int]]]:
    """By layer and KV head: positions of the anchors, ascending."""
    pages = store.sequence(sequence).anchors
    return [
        [sorted(p for page in pages for p in page.positions[layer, head].tolist() if p >= 0) for head in range(H)] for layer in range(L)
    ]
