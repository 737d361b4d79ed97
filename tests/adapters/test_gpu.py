"""The adapter with compiled kernels: the same numbers as with the PyTorch references on the same GPU."""

import itertools

import pytest
import torch

from kvstrata.adapters.hf import attached, cache_keyword, store_config
from kvstrata.store.store import Store
from kvstrata.types import Plan, Tier
from tests.adapters.test_hf import forward
from tests.adapters.test_hyquant import hyquant
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend, tier, anchor_tier",
    [("triton", Tier.INT2, Tier.BF16), ("auto", Tier.INT2, Tier.BF16), ("auto", Tier.INT4, Tier.INT8)],
)
def test_decoding_over_anchors_gives_what_the_references_give(
    backend: str, tier: Tier, anchor_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, and tokens one by one while anchors are chosen anew: the same tokens' logits on the CPU, in PyTorch and by kernels."""
    ids = torch.randint(3, VOCAB, (2, 470), generator=torch.Generator().manual_seed(2))
    cuts = [*range(330, 470), 470]
    logits = {}
    for name, device in (("cpu", "cpu"), ("torch", "cuda"), (backend, "cuda")):
        monkeypatch.setenv("KVSTRATA_BACKEND", "torch" if device == "cpu" else name)
        model = tiny("qwen3").to(device, torch.bfloat16)
        store = Store(store_config(model, 3000, window=32), device)
        planner = hyquant(store, tier=tier, anchor_tier=anchor_tier, rho=0.1)
        with attached(model, store, planner) as cache, torch.no_grad():
            parts = [forward(model, cache, ids[:, a:b].to(device)).float() for a, b in itertools.pairwise([0, *cuts])]
            store.check_integrity()
            assert all(len(s.anchors) >= 1 for s in store.sequences)
        logits[name] = torch.cat(parts, 1).cpu()
    for name in ("cpu", "torch"):
        assert (logits[name] - logits[backend]).norm() < 0.03 * logits[name].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("prefill", ["int8", "fp8"])
def test_a_first_prompt_in_eight_bits_is_near_one_in_sixteen(prefill: str) -> None:
    model = tiny("qwen3").to("cuda", torch.bfloat16)
    ids = torch.randint(3, VOCAB, (1, 700), generator=torch.Generator().manual_seed(3)).cuda()
    logits = []
    for how in (None, prefill):
        store = Store(store_config(model, 1500, window=32), "cuda")
        with attached(model, store, hyquant(store, prefill=how)) as cache, torch.no_grad():
            logits.append(forward(model, cache, ids).float())
    assert 0 < (logits[0] - logits[1]).norm() < 0.05 * logits[0].norm()
