"""Pages of the prefix cache that give up planes when the pool runs short: more is found, nothing that is held changes, no block is lost."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.types import PAGE_SIZE, Tier

from .engines import Engine, growing_work
from .reference import by_transformers

UNIFORM: dict[str, Any] = {"policy": "uniform", "tier": "INT4"}
TAGS: dict[str, Any] = {"policy": "triaxial", "budget_bits": 5.0, "horizon": 1024}
EXACT: dict[str, Any] = {"dense_dtype": "float32"}
Start = Callable[..., Engine]


def conversations(n: int, turns: int, seed: int = 0) -> list[list[list[int]]]:
    """Prompts of `turns` rounds of n conversations, each its last and more: a conversation waits while the others have their turns."""
    r = random.Random(seed)
    talks = [[r.randrange(20, 49_000) for _ in range(300)] for _ in range(n)]
    rounds = []
    for _ in range(turns):
        rounds.append([list(talk) for talk in talks])
        for talk in talks:
            talk += [r.randrange(20, 49_000) for _ in range(40)]
    return rounds


def talk(engine: Engine, rounds: list[list[list[int]]]) -> list[int]:
    """Tokens found in each round, one conversation after another."""
    return [sum(engine.run([(prompt, 4)])[0].found for prompt in prompts) for prompts in rounds]


def tiers_held(engine: Engine) -> dict[str, list[Tier]]:
    """Tiers of each request's pages when it ends."""
    seen: dict[str, list[Tier]] = {}
    ends = engine.scheduler.frames.ends

    def watched(request_id: str) -> None:
        seen[request_id] = [p.tier for p in engine.scheduler.frames.holdings[request_id].pages]
        ends(request_id)

    engine.scheduler.frames.ends = watched
    return seen


@pytest.mark.parametrize(("settings", "frames"), [(UNIFORM, 350), (TAGS, 340)], ids=["uniform", "tags"])
def test_more_is_found_under_pressure(start: Start, settings: dict[str, Any], frames: int) -> None:
    """Eight conversations of 300 to 340 tokens, which the pool cannot hold at their planned tiers."""
    rounds = conversations(8, 2)
    found = {}
    for ageing in (False, True):
        engine = start(settings | ({"ageing": "INT2"} if ageing else {}), num_gpu_blocks_override=frames)
        found[ageing] = talk(engine, rounds)[-1]
        cached = engine.scheduler.frames.cached
        assert (cached.demoted > 0) == ageing and (ageing or cached.dropped > 0)
        figures = engine.scheduler.figures.figures([])
        assert figures.demoted_pages == cached.demoted and figures.dropped_pages == cached.dropped
        assert (figures.cached_pages["INT2"] > 0) == ageing and sum(figures.cached_pages.values()) == sum(cached.by_tier.values())
    print(f"found {found[False]} and {found[True]}")
    assert found[True] > 1.5 * found[False]


def test_a_demoted_page_is_attended_at_the_tier_that_it_has(start: Start, tiny_model: Path) -> None:
    """Against the `transformers` adapter, which demotes the same pages between the same turns."""
    engine = start(UNIFORM | EXACT | {"ageing": "INT2"}, num_gpu_blocks_override=376, max_logprobs=-1, logprobs_mode="raw_logits")
    held = tiers_held(engine)
    ((prompt, *others), (later, *_)) = conversations(6, 2, seed=1)
    engine.run([(prompt, 4)])
    for other in others:
        engine.run([(other, 4)])
    held.clear()
    (mine,) = engine.run([(later, 12)], logits=True)
    (tiers,) = held.values()
    found = tiers[: mine.found // PAGE_SIZE]
    print(f"found at {[t.name for t in found]}")
    assert len(found) == 9 and found[0] is Tier.BF16 and set(found[1:]) > {Tier.INT3}
    planned = [Tier.BF16] + [Tier.INT4] * 20
    assert tiers[len(found) :] == planned[len(found) : len(tiers)]
    assert mine.logits is not None
    demoted = by_transformers(tiny_model, planned, later, mine.tokens, PAGE_SIZE, demoted=(mine.found, found))
    as_written = by_transformers(tiny_model, planned, later, mine.tokens, PAGE_SIZE)
    as_it_is, as_it_was = (float((mine.logits - x).abs().max()) for x in (demoted, as_written))
    print(f"logits differ by {as_it_is:.2g} from those of the same tiers, by {as_it_was:.2g} from those of the tiers before")
    assert as_it_is < 1e-2 < as_it_was / 5
    assert mine.tokens == demoted.argmax(-1).tolist()


def test_a_later_turn_gives_up_planes_to_be_admitted(start: Start) -> None:
    """A long request runs, and beside it there is room for a conversation whose pages are coarser, but not for one as it was written."""
    ((prompt,), (later,)) = conversations(1, 2)
    long = conversations(1, 1, seed=5)[0][0] * 3
    running = {}
    for ageing in (False, True):
        engine = start(UNIFORM | ({"ageing": "INT2"} if ageing else {}), num_gpu_blocks_override=165)
        engine.run([(prompt, 4)])
        held = tiers_held(engine)
        first, second = engine.run([(long[:680], 20), (later[:330], 10)])
        running[ageing] = engine.seen.most_running
        assert second.found == 288 and engine.seen.preempted == 0
        tiers = next(t for t in held.values() if len(t) == 10)
        # just as many planes as are wanted
        assert tiers[1:] == [Tier.INT3 if ageing else Tier.INT4] * 8 + [Tier.INT4]
    assert running == {False: 1, True: 2}


def test_what_is_held_stays_and_what_was_reset_is_gone(start: Start) -> None:
    """Mixed requests in a small pool, preempted and resumed: no row changes under a request, and no page gives what it does not own."""
    engine = start(UNIFORM | {"ageing": "INT2"}, num_gpu_blocks_override=150, max_model_len=512, max_num_batched_tokens=96,
                   scheduler_reserve_full_isl=False)  # fmt: skip
    frames, rows = engine.scheduler.frames, {}
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = schedule(*args, **kwargs)
        for request_id in out.kvstrata.preempted:
            rows.pop(request_id, None)
        for request_id in out.num_scheduled_tokens:
            row = [b.block_id for b in frames.req_to_blocks[request_id]]
            known = rows.get(request_id, [])
            assert row[: len(known)] == known
            rows[request_id] = row
        return out

    engine.scheduler.schedule = watched
    work = growing_work(seed=3)
    low = [{"kvstrata_tier": "INT3"} if i % 4 == 1 else None for i in range(len(work))]
    for wave in (work, work[::-1], work):
        assert all(len(r.tokens) == n for r, (_, n) in zip(engine.run(wave, extra=low), wave, strict=True))
    assert engine.seen.preempted > 3 and frames.cached.demoted > 20 and frames.cached.dropped > 20
    # nothing was ever handed out of a page that could still be found
    assert frames.cached.broken == 0
    assert engine.llm.reset_prefix_cache() and not any(frames.cached.by_tier.values())
    assert engine.run([work[2]])[0].found == 0
