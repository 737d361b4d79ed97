"""policy=hyquant in front of real attention code: families, layers outside the store, types, turns, generation."""

from typing import Any

import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from kvstrata.adapters.hf import attached, store_config
from kvstrata.policy import Signals, make_policy
from kvstrata.store.store import Store
from kvstrata.types import Plan, Tier
from tests.adapters.test_hf import FAMILIES, forward, prompt
from tests.models import tiny


def hyquant(store: Store, **settings: Any) -> Any:
    policy = make_policy("hyquant", **settings)

    def planner(ids: list[int]) -> Plan:
        return policy.plan((), len(ids), Signals(window_pages=-(-len(ids) // 32) - store.first_window_page(len(ids))))

    return planner


def run(model: PreTrainedModel, ids: torch.Tensor, cuts: list[int], dense_dtype: str = "float32", **settings: Any) -> torch.Tensor:
    """Logits of the chunks, and one check that anchors are there."""
    store = Store(store_config(model, 1500, dense_dtype=dense_dtype, window=32))
    with attached(model, store, hyquant(store, **settings)) as cache:
        out = torch.cat([forward(model, cache, ids[:, a:b]) for a, b in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True)], 1)
        for s in store.sequences:
            assert sum(page.tokens for page in s.anchors) == s.plan.anchors.count * store.config.num_layers * store.config.num_kv_heads
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_anchors_for_all_of_the_body_equal_an_uncompressed_cache(family: str) -> None:
    """Layers with a sliding window keep theirs outside of the store; the others keep everything whole."""
    model = tiny(family)
    ids = prompt(2, 180)
    with torch.no_grad():
        reference = model(input_ids=ids).logits
    whole = run(model, ids, [150, 151, 152], tier=Tier.INT2, rho=1.0, sinks=0)
    assert (whole - reference).abs().max() < 2e-4 * reference.abs().max()
    coarse = run(model, ids, [150, 151, 152], tier=Tier.INT2, rho=0.0, sinks=0) if family == "llama" else None
    assert coarse is None or (coarse - reference).abs().max() > 1e-2 * reference.abs().max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_byte_models_choose_anchors_too(dtype: str) -> None:
    model = tiny("qwen2").to(getattr(torch, dtype))
    ids = prompt(1, 170)
    with torch.no_grad():
        reference = model(input_ids=ids).logits.float()
    errors = [
        (run(model, ids, [160, 161], dtype, tier=Tier.INT2, rho=rho, sinks=0).float() - reference)[:, 160:].square().mean()
        for rho in (1.0, 0.01)
    ]
    assert errors[0] * 4 < errors[1]


def test_a_second_turn_after_a_generation_attends_all_of_both() -> None:
    """A prompt, forty tokens one by one while anchors move every eight, and a turn that sees them all."""
    model = tiny("qwen3")
    ids = prompt(1, 190)
    with torch.no_grad():
        reference, alone = model(input_ids=ids).logits[:, 170:], model(input_ids=ids[:, 170:]).logits
    got = run(model, ids, list(range(130, 171)), tier=Tier.INT8, rho=0.3, refresh=8)[:, 170:]
    error, without = ((x - reference).square().mean().sqrt() / reference.square().mean().sqrt() for x in (got, alone))
    assert error < 0.1 * without


def test_a_first_prompt_in_eight_bits() -> None:
    """All of the body as lines: nothing is coarse. Few: something is. A turn that comes later is not in eight bits."""
    model = tiny("qwen2")
    ids = prompt(2, 420)
    with torch.no_grad():
        reference = model(input_ids=ids).logits
    settings = {"tier": Tier.INT8, "sinks": 0}
    errors = {
        (how, rho): float((run(model, ids, [], **settings, rho=rho, prefill=how) - reference).norm() / reference.norm())
        for how, rho in ((None, 0.1), ("int8", 1.0), ("int8", 0.1), ("int8", 0.002), ("fp8", 0.1))
    }
    assert errors[None, 0.1] < 1e-5 and errors["int8", 1.0] < 1e-5
    assert 1e-5 < errors["int8", 0.1] < errors["int8", 0.002] < 0.03
    assert errors["int8", 0.1] < errors["fp8", 0.1] < 0.05
    turns, plain = (run(model, ids, [200], **settings, rho=0.1, prefill=how) for how in ("int8", None))
    assert not torch.equal(turns[:, :200], plain[:, :200])


def test_short_prompts_and_other_formats() -> None:
    model = tiny("llama")
    ids = prompt(1, 32 + 128)
    settings = {"tier": Tier.INT8, "rho": 0.1, "sinks": 0}
    assert torch.equal(run(model, ids, [], **settings, prefill="int8"), run(model, ids, [], **settings))
    with pytest.raises(ValueError, match="prefill is 'int4'"):
        make_policy("hyquant", prefill="int4")
