"""A model that sees: a screenshot through tag, plan, store, attention and the turns after it. Qwen3-VL's code, tiny and random."""

from typing import Any

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from kvstrata.adapters.hf import attached, cache_keyword, store_config
from kvstrata.policy import Budget, Signals, make_policy
from kvstrata.policy.tags import MODALITIES, tags_by_token
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Modality, Plan, Role, Span, Tier

IMAGE, BEFORE, AFTER = 10, 12, 13
TURN = 200
"""Tokens of a turn: 40 of text, a screenshot of 32 x 32 pixels in 64 tokens and its two marks, and the rest text again."""


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    text = {
        "vocab_size": 320, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True, "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "patch_size": 2, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": 96, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=11, vision_start_token_id=BEFORE,
        vision_end_token_id=AFTER,
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config).eval()


def screenshot() -> torch.Tensor:
    """A window with a title bar and a button, as 16 x 16 patches of 2 x 2 pixels, 3 colours and 2 frames."""
    pixels = torch.full((32, 32), 0.9)
    pixels[:4] = 0.2
    pixels[20:26, 10:22] = -0.5
    patches = pixels.unfold(0, 2, 2).unfold(1, 2, 2).reshape(256, 4)
    return patches.repeat(1, 6)


def turn(number: int) -> dict[str, torch.Tensor]:
    text = torch.randint(20, 320, (TURN - 66,), generator=torch.Generator().manual_seed(number)).tolist()
    ids = torch.tensor([[*text[:40], BEFORE, *[IMAGE] * 64, AFTER, *text[40:]]])
    return {"input_ids": ids, "pixel_values": screenshot(), "image_grid_thw": torch.tensor([[1, 16, 16]]),
            "mm_token_type_ids": (ids == IMAGE).long()}  # fmt: skip


def spans(n: int) -> tuple[Span, ...]:
    out = []
    for t in range(-(-n // TURN)):
        at = t * TURN
        out += [Span(at, at + 41, Role.USER, t + 1), Span(at + 41, at + 105, Role.OBS, t + 1, Modality.IMAGE),
                Span(at + 105, at + TURN, Role.ASSISTANT, t + 1)]  # fmt: skip
    return tuple(s for s in out if s.end <= n)


def run(model: Any, planner: Any, dense_dtype: str) -> tuple[list[torch.Tensor], list[Tier]]:
    """Logits of five turns, and the tiers of the pages at the end."""
    store = Store(store_config(model, 6 * TURN, dense_dtype=dense_dtype))
    logits = []
    with torch.no_grad(), attached(model, store, lambda ids: planner(store, ids)) as cache:
        for number in range(5):
            logits.append(model(**turn(number), **{cache_keyword(model): cache}).logits)
        store.check_integrity()
        return logits, [page.tier for page in store.sequence(cache.sequence_ids[0]).pages]


@pytest.fixture(scope="module")
def plain(model: Any) -> list[torch.Tensor]:
    past, out = None, []
    with torch.no_grad():
        for number in range(5):
            past = model(**turn(number), **{cache_keyword(model): past[cache_keyword(model)] if past else None}, use_cache=True)
            out.append(past.logits)
    return out


def test_full_equals_transformers_own_cache(model: Any, plain: list[torch.Tensor]) -> None:
    logits, tiers = run(model, lambda store, ids: Plan((Tier.BF16,) * 64, Tier.BF16), "float32")
    for ours, theirs in zip(logits, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert set(tiers) == {Tier.BF16}


def test_old_screenshots_settle_at_int2_and_the_turns_go_on(model: Any, plain: list[torch.Tensor]) -> None:
    tags = tags_by_token(spans(5 * TURN), 5 * TURN)
    assert (tags.modality == MODALITIES.index(Modality.IMAGE)).sum() == 5 * 64
    policy = make_policy("role", sinks=0)
    logits, tiers = run(model, lambda store, ids: policy.plan(spans(len(ids)), len(ids), Signals(len(ids) // TURN)), "bfloat16")
    # the pages that lie wholly inside the first turn's screenshot
    assert tiers[41 // PAGE_SIZE + 1 : 105 // PAGE_SIZE] == [Tier.INT2]
    assert tiers[0] is Tier.INT3
    for ours, theirs in zip(logits, plain, strict=True):
        assert torch.isfinite(ours).all()
        difference = (ours.log_softmax(-1).exp() * (ours.log_softmax(-1) - theirs.log_softmax(-1))).sum(-1).mean()
        assert difference < 1e-3


def test_the_table_of_tags_plans_images_within_its_budget(model: Any) -> None:
    policy = make_policy("triaxial")

    def planner(store: Store, ids: list[int]) -> Plan:
        n = len(ids)
        pages = -(-n // PAGE_SIZE) - store.first_window_page(n)
        elements = store.layout.elements(PAGE_SIZE)
        limit = Budget(store.layout.tier_bytes(), n, elements, bits=6.0 if n > 2 * TURN else 20.0, window_pages=pages)
        return policy.plan(spans(n), n, Signals(n // TURN), limit)

    logits, tiers = run(model, planner, "bfloat16")
    assert all(torch.isfinite(x).all() for x in logits)
    store = Store(store_config(model, TURN))
    assert sum(store.layout.page_bytes(t) for t in tiers) * 8 <= 6.0 * store.layout.elements(5 * TURN)
