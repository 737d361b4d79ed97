"""A plain reference of what a store holds: every token's K and V are functions of the token."""

from typing import Any

import torch

from kvstrata.config import StoreConfig
from kvstrata.ops import quant
from kvstrata.store.step import Step
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Tier

L, H, D = 2, 2, 64


def make_store(num_frames: int = 2000, **settings_: Any) -> Store:
    values = {"num_layers": L, "num_kv_heads": H, "head_dim": D, "num_frames": num_frames, "dense_dtype": "float32"} | settings_
    store = Store(StoreConfig.from_dict(values))
    # what was never written must never be read
    store.arena.buffer.fill_(0xFF)
    store.arena.buffer[:, 0] = 0
    return store


def kv(tokens: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V that depend on the token alone."""
    g = torch.arange(H * D, dtype=torch.float64).view(1, H, D)
    t = torch.tensor(tokens, dtype=torch.float64).view(-1, 1, 1)
    noise = [torch.sin(t * a + g * b + layer) * 43758.5453 for a, b in ((12.9898, 78.233), (39.346, 11.135))]
    k, v = ((2 * (x - x.floor()) - 1).float() for x in noise)
    return k, v


def feed(store: Store, ids: list[int], tokens: list[list[int]], *, commit: bool = True) -> None:
    step = store.begin(ids, tokens)
    flat = [t for row in tokens for t in row]
    for layer in range(L):
        # queries, which only sequences with anchors need, are keys
        step.write(layer, *kv(flat, layer), kv(flat, layer)[0])
    end(store, step, commit)


def end(store: Store, step: Step, commit: bool) -> None:
    """Commit or abort, the books checked on both sides."""
    store.check_integrity()
    if commit:
        step.commit()
    else:
        step.abort()
    store.check_integrity()


def stored(store: Store, sequence: int, layer: int) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Live K and V by position, V rotated back."""
    k_out, v_out = {}, {}
    for p, page in enumerate(store.sequence(sequence).pages):
        if not page.frames:
            continue
        frames = torch.tensor([page.frames], dtype=torch.int32)
        k, v = store.read_pages(store.arena.buffer[layer], frames, page.tier)
        v = quant.rotate(v.float()) if store.layout.codec.rotates_v else v.float()
        for j in range(PAGE_SIZE):
            if page.live >> j & 1:
                k_out[p * PAGE_SIZE + j], v_out[p * PAGE_SIZE + j] = k[0, j].float(), v[0, j]
    return k_out, v_out


TOLERANCE = {Tier.INT2: 0.4, Tier.INT3: 0.12, Tier.INT4: 0.12, Tier.INT8: 0.02, Tier.BF16: 1e-5}
"""Largest error of K, in [-1, 1]; V's is spread by the rotation."""
V_TOLERANCE = {Tier.INT2: 1.3, Tier.INT3: 1.3, Tier.INT4: 0.35, Tier.INT8: 0.03, Tier.BF16: 1e-5}


def check_content(store: Store, sequence: int) -> None:
    s = store.sequence(sequence)
    for layer in range(L):
        if not s.token_ids:
            continue
        k_ref, v_ref = kv(s.token_ids, layer)
        k, v = stored(store, sequence, layer)
        for position in k:
            tier = s.pages[position // PAGE_SIZE].tier
            assert (k[position] - k_ref[position]).abs().max() < TOLERANCE[tier], (position, tier)
            assert (v[position] - v_ref[position]).abs().max() < V_TOLERANCE[tier], (position, tier)
