"""A step's attention and writes against plain attention in float64 that knows no frames, however the tokens were cut into steps."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvstrata.adapters.vllm.delta import NewPage
from kvstrata.adapters.vllm.settings import EngineSettings
from kvstrata.types import PAGE_SIZE, Tier

from .steps import Engine, Request, expected

TIERS = [Tier.BF16, Tier.INT2, Tier.INT4, Tier.INT3, Tier.INT8, Tier.INT2, Tier.INT3, Tier.INT4, Tier.BF16, Tier.INT2]
WINDOWS = (0, 64, 128)


def settings(window: int, dense_dtype: str = "float32") -> EngineSettings:
    return EngineSettings(policy="uniform", window=window, dense_dtype=dense_dtype)


def cut(total: int, cuts: list[int]) -> list[int]:
    """Steps of these sizes, and what is left as one more and five single tokens."""
    out: list[int] = []
    for n in cuts:
        if sum(out) < total:
            out.append(min(n, total - sum(out)))
    left = total - sum(out)
    return out + [max(0, left - 5)] * (left > 5) + [1] * min(left, 5)


@pytest.mark.parametrize("window", WINDOWS)
@given(st.lists(st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 96, 130, 200]), max_size=6), st.integers(1, 260))
@hypothesis_settings(max_examples=15)
def test_queries_see_the_same_however_a_prompt_is_cut(window: int, cuts: list[int], tokens: int) -> None:
    s = settings(window)
    engine, r = Engine(s), Request.random("a", tokens, TIERS, seed=tokens)
    for n in cut(tokens, cuts):
        engine.step([(r, n)])
    torch.testing.assert_close(r.out.double(), expected(r, s.group, torch.float32), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", WINDOWS)
def test_bfloat16_pages_hold_rounded_numbers(window: int) -> None:
    s = settings(window, "bfloat16")
    engine, r = Engine(s), Request.random("a", 150, TIERS, seed=5)
    for _ in range(150):
        engine.step([(r, 1)])
    torch.testing.assert_close(r.out.double(), expected(r, s.group, torch.bfloat16), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", WINDOWS)
def test_decoding_and_chunked_requests_in_one_batch(window: int) -> None:
    s = settings(window)
    engine = Engine(s)
    a, b, c = (Request.random(x, n, TIERS[i:], seed=i) for i, (x, n) in enumerate([("a", 140), ("b", 255), ("c", 199)]))
    engine.step([(a, 100)])
    for n in (70, 58, 127):
        engine.step([(a, 1), (b, n), (c, 3)])
    while a.computed < 140:
        engine.step([(a, 1), (c, 2)])
    while c.computed < 199:
        engine.step([(c, 1)])
    for r in (a, b, c):
        torch.testing.assert_close(r.out.double(), expected(r, s.group, torch.float32), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", WINDOWS)
def test_found_pages_serve_as_if_computed_and_may_be_written_in_the_same_step(window: int) -> None:
    s = settings(window)
    engine = Engine(s)
    a, b = Request.random("a", 300, TIERS, seed=1), Request.random("b", 300, TIERS, seed=1)
    # b finds what a writes in this very step
    found = 256 // s.group * s.group
    pages = [NewPage(int(t), engine.take(engine.frames[t])) for t in TIERS[: found // PAGE_SIZE]]
    engine.begin(b, pages)
    a.taken = list(pages)
    engine.step([(a, 300), (b, 300 - found)])
    want = expected(a, s.group, torch.float32)
    torch.testing.assert_close(a.out.double(), want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(b.out[found:].double(), want[found:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_preempted_request_begins_anew_in_other_frames(window: int) -> None:
    s = settings(window)
    engine = Engine(s)
    a, b = Request.random("a", 200, TIERS, seed=1), Request.random("b", 90, TIERS, seed=2)
    engine.step([(a, 150)])
    engine.step([(b, 80)], preempted=["a"])
    engine.begin(a)
    engine.step([(b, 1), (a, 70)])
    while b.computed < 90:
        engine.step([(b, 1), (a, 12)])
    engine.step([(a, 200 - a.computed)])
    for r in (a, b):
        torch.testing.assert_close(r.out.double(), expected(r, s.group, torch.float32), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_chunk_of_one_token_may_come_last(window: int) -> None:
    s = settings(window)
    engine = Engine(s)
    a, b, c = (Request.random(x, n, TIERS, seed=n) for x, n in (("a", 70), ("b", 68), ("c", 66)))
    engine.step([(a, 69), (b, 1)])
    engine.step([(a, 1), (b, 63), (c, 1)])
    engine.step([(b, 3), (c, 63)])
    engine.step([(b, 1), (c, 1)])
    engine.step([(c, 1)])
    for r in (a, b, c):
        torch.testing.assert_close(r.out.double(), expected(r, s.group, torch.float32), atol=2e-5, rtol=1e-4)


def test_a_slot_is_free_again_when_its_request_ends() -> None:
    engine = Engine(settings(0), slots=2)
    for i in range(5):
        r = Request.random(f"r{i}", 40, TIERS, seed=i)
        engine.step([(r, 40)])
        engine.tables.release(r.id)
    assert len(engine.tables) == 0
