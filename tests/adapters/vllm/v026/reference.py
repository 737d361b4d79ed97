"""The same tokens through the `transformers` adapter: what the plugin's logits are compared with."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvstrata.adapters.hf import attached, cache_keyword, store_config
from kvstrata.store.store import Store
from kvstrata.types import Plan, Tier


def by_transformers(
    folder: Path, tiers: list[Tier], prompt: list[int], generated: list[int], piece: int,
    demoted: tuple[int, list[Tier]] | None = None,
) -> Tensor:  # fmt: skip
    """Logits float32 [generated, vocabulary] of the same tokens, the prompt in pieces that end with pages. demoted: tiers that the first
    so many tokens' pages have from then on."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    store = Store(store_config(model, 1024, window=0, dense_dtype="float32"))

    def plan(ids: list[int]) -> Plan:
        if demoted is None or len(ids) <= demoted[0]:
            return Plan(tuple(tiers))
        return Plan((*demoted[1], *tiers[len(demoted[1]) :]))

    out = []
    with attached(model, store, planner=plan) as cache, torch.no_grad():
        for start in range(0, len(prompt), piece):
            logits = model(torch.tensor([prompt[start : start + piece]]), **{cache_keyword(model): cache}).logits[0, -1]
        out.append(logits)
        for token in generated[:-1]:
            out.append(model(torch.tensor([[token]]), **{cache_keyword(model): cache}).logits[0, -1])
        store.check_integrity()
    return torch.stack(out)
