"""Two ranks: each has half of the heads in frames of its own, at the tiers that the one scheduler chose."""

from collections.abc import Callable
from typing import Any

from .engines import Engine, mixed_work, tokens

SETTINGS: dict[str, Any] = {"policy": "triaxial", "budget_bits": 5.0, "horizon": 1024, "dense_dtype": "float32", "ageing": "INT2"}
WORK = mixed_work(seed=2, n=7)


def test_two_ranks_give_the_tokens_of_one(start: Callable[..., Engine]) -> None:
    """In a pool so small that the second wave finds pages that gave up planes: what is demoted is decided once, for both."""
    results, books, rank_bytes = [], [], []
    for parallel in ({}, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}):
        engine = start(SETTINGS, num_gpu_blocks_override=260, **parallel)
        results.append([engine.run(WORK), engine.run(WORK[::-1])])
        cached = engine.scheduler.frames.cached
        books.append((cached.demoted, cached.dropped, cached.by_tier))
        rank_bytes.append(engine.scheduler.figures.figures([]).frame_bytes)
    one, two = results
    assert [tokens(wave) for wave in two] == [tokens(wave) for wave in one]
    assert [[r.found for r in wave] for wave in two] == [[r.found for r in wave] for wave in one] and one[1][0].found > 0
    assert books[0] == books[1] and books[0][0] > 0
    # a rank has one KV head of the two: half of the bytes for as many tokens
    assert rank_bytes[1] * 2 == rank_bytes[0]
