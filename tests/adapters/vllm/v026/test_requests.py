"""A request's tokens do not depend on who else runs, on chunks, on what the cache had, or on preemption; and no block leaks."""

from collections.abc import Callable
from typing import Any

import pytest

from .engines import Engine, growing_work, mixed_work, tokens

WORK = mixed_work()
ORDER = list(range(len(WORK)))
WAVES = [ORDER, ORDER[::-1], ORDER[::2] + ORDER[1::2]]
GROWING = growing_work()
SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 150,
    "max_model_len": 512,
    "max_num_batched_tokens": 96,
    "scheduler_reserve_full_isl": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "uniform": {"policy": "uniform", "tier": "INT3"},
    "budget": {"policy": "uniform", "budget_bits": 5.0, "horizon": 512, "window": 64},
    "tags": {"policy": "triaxial", "budget_bits": 5.0, "horizon": 1024},
}
Start = Callable[..., Engine]


def dense(name: str) -> dict[str, Any]:
    """BF16 pages hold float32: a token that is computed anew is then the very same."""
    return SETTINGS[name] | {"dense_dtype": "float32"}


@pytest.mark.parametrize("name", SETTINGS)
def test_alone_together_and_found_in_the_cache(start: Start, name: str) -> None:
    engine = start(dense(name))
    want = tokens(engine.alone(WORK))
    assert len({tuple(t) for t in want}) > len(WORK) - 2, "the model tells prompts apart"
    found = []
    for wave in WAVES:
        results = engine.run([WORK[i] for i in wave])
        assert tokens(results) == [want[i] for i in wave]
        found.append(sum(r.found for r in results))
    # later waves find what the first left, and it found the prefixes that its own requests share
    assert found[1] > found[0] > 0
    assert engine.seen.most_running > 5


@pytest.mark.parametrize("name", SETTINGS)
def test_preempted_and_resumed(start: Start, name: str) -> None:
    """Requests are admitted by their first chunk alone, so that they run out of frames inside a prompt too."""
    engine = start(dense(name), **SMALL)
    want = tokens(engine.alone(GROWING))
    for wave in (GROWING, GROWING[::-1]):
        order = [GROWING.index(item) for item in wave]
        assert tokens(engine.run(wave)) == [want[i] for i in order]
    assert engine.seen.preempted > 3
    # pages lost a frame and were not taken for whole
    assert engine.scheduler.frames.cached.broken > 0


def test_without_prefix_caching(start: Start) -> None:
    engine = start(dense("tags"), enable_prefix_caching=False, **SMALL)
    want = [tokens(engine.run([item]))[0] for item in GROWING]
    assert tokens(engine.run(GROWING)) == want
    assert engine.seen.preempted > 3
