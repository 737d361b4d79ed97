"""What the strata are for: more tokens and more requests in the same bytes; and a hit rate that is the engine's own."""

from collections.abc import Callable
from typing import Any

from .engines import Engine, mixed_work

WORK = mixed_work(seed=7)
BF16_BLOCKS = 33
"""Blocks of 32 tokens, the null block among them: 1,024 tokens in bfloat16, the longest request."""


def frames_in(blocks: int) -> int:
    """Frames in as many bytes: at head_dim 64 a block of 32 tokens has 8,192 bytes for each KV head, a frame 608."""
    return blocks * 8192 // 608


def test_more_tokens_and_requests_in_the_same_bytes(start: Callable[..., Engine]) -> None:
    same: dict[str, Any] = {"dtype": "bfloat16", "enable_prefix_caching": False}
    stock = start(None, block_size=32, num_gpu_blocks_override=BF16_BLOCKS, **same)
    running, tokens = watch(stock)
    found = stock.run(WORK)
    ours = start({"policy": "uniform", "tier": "INT3"}, num_gpu_blocks_override=frames_in(BF16_BLOCKS), **same)
    assert ours.run(WORK)
    assert len(found) == len(WORK)
    print(f"running {running()} and {ours.seen.most_running}, tokens {tokens()} and {ours.seen.most_tokens}")
    assert ours.seen.most_tokens >= 1.5 * tokens()
    assert ours.seen.most_running > running()
    figures = ours.scheduler.figures.figures([])
    assert figures.bf16_tokens <= BF16_BLOCKS * 32
    # 31 pages of 3 frames, a sink and a page that is being filled, of 14 each
    assert figures.capacity_tokens == figures.frames * 1024 // (30 * 3 + 2 * 14)


def watch(engine: Engine) -> tuple[Callable[[], int], Callable[[], int]]:
    """Most requests and tokens at once in an engine that is not ours."""
    most = [0, 0]
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = schedule(*args, **kwargs)
        running = engine.scheduler.running
        most[:] = max(most[0], len(running)), max(most[1], sum(r.num_computed_tokens for r in running))
        return out

    engine.scheduler.schedule = watched
    return lambda: most[0], lambda: most[1]


def test_the_hit_rate_is_the_engines(start: Callable[..., Engine]) -> None:
    found = []
    for settings, arguments in ((None, {"block_size": 32}), ({"policy": "uniform", "tier": "INT3"}, {})):
        engine = start(settings, **arguments)
        rounds = [engine.run(WORK), engine.run(WORK[::-1])]
        # a conversation: the next prompt is the last with its reply and more
        talk = WORK[2][0][:200]
        for turn in range(4):
            (reply,) = engine.run([(talk, 41)])
            rounds.append([reply])
            talk = talk + WORK[0][0][:41] + [100 + turn] * 30
        found.append([[r.found for r in results] for results in rounds])
    assert found[0] == found[1]


def test_a_requests_own_settings_share_nothing_with_others(start: Callable[..., Engine]) -> None:
    settings = {"policy": "uniform", "dense_dtype": "float32"}
    coarse = start(settings | {"tier": "INT2"}).run(WORK[:3])
    engine = start(settings | {"tier": "INT4"})
    mine = engine.run(WORK[:3])
    assert [r.tokens for r in mine] != [r.tokens for r in coarse]
    low = {"kvstrata_tier": "INT2"}
    first = engine.run(WORK[:3], extra=[low] * 3)
    # among the three there are shared prefixes, but none with what ran before
    assert [r.tokens for r in first] == [r.tokens for r in coarse] and [r.found for r in first] == [r.found for r in coarse]
    again = engine.run([WORK[0], WORK[0]], extra=[low, None])
    assert all(r.found for r in again) and [r.tokens for r in again] == [coarse[0].tokens, mine[0].tokens]
