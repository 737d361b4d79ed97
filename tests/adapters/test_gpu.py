"""The adapter with compiled kernels: the same numbers as with the PyTorch references on the same GPU."""

import pytest
import torch

from kvstrata.adapters.hf import attached, cache_keyword, store_config
from kvstrata.store.store import Store
from kvstrata.types import Plan, Tier
from tests.models import VOCAB, tiny


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tier", [Tier.INT2, Tier.INT3, Tier.INT4, Tier.BF16])
def test_kernels_and_references_give_the_same_logits(family: str, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family).to("cuda", torch.bfloat16)
    ids = torch.randint(3, VOCAB, (2, 420), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    logits = {}
    for backend in ("torch", "triton", "auto"):
        monkeypatch.setenv("KVSTRATA_BACKEND", backend)
        store = Store(store_config(model, 1000), "cuda")
        with attached(model, store, lambda _: Plan((Tier.BF16,), tier)) as cache, torch.no_grad():
            parts = []
            for a, b in ((0, 300), (300, 390), *((i, i + 1) for i in range(390, 420))):
                arguments = {"input_ids": ids[:, a:b], "attention_mask": mask[:, :b], cache_keyword(model): cache}
                parts.append(model(**arguments).logits.float())
                store.check_integrity()
            logits[backend] = torch.cat(parts, 1)[mask.bool()]
    for backend in ("triton", "auto"):
        assert (logits["torch"] - logits[backend]).norm() < 0.03 * logits["torch"].norm(), backend
