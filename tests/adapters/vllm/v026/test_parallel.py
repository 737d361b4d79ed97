"""Two ranks: each has half of the heads in frames of its own, at the tiers that the one scheduler chose."""

from collections.abc import Callable
from typing import Any

from .engines import Engine, mixed_work, tokens

SETTINGS: dict[str, Any] = {"policy": "triaxial", "budget_bits": 5.0, "horizon": 1024, "dense_dtype": "float32"}
WORK = mixed_work(seed=2)


def test_two_ranks_give_the_tokens_of_one(start: Callable[..., Engine]) -> None:
    want = start(SETTINGS).run(WORK)
    engine = start(SETTINGS, tensor_parallel_size=2, distributed_executor_backend="mp")
    got, again = engine.run(WORK), engine.run(WORK[::-1])[::-1]
    assert tokens(got) == tokens(want) and tokens(again) == tokens(want)
    assert [r.found for r in got] == [r.found for r in want]
    # a rank has one KV head of the two: half of the bytes for as many tokens
    figures = engine.scheduler.figures.figures([])
    assert figures.frame_bytes * 2 == start(SETTINGS).scheduler.figures.figures([]).frame_bytes
