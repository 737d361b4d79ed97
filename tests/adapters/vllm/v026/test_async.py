"""A scheduler that is a step ahead: the same tokens as one that waits.

On a CPU the engine switches this off, for there is nothing to overlap. Here its scheduler and its queue of steps run as on a GPU, each step
scheduled before the last one's tokens are known; only the worker hands its tokens over at once.
"""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvstrata.adapters.vllm.v026 import config

from .engines import Engine, growing_work, mixed_work, tokens

SETTINGS: dict[str, Any] = {"policy": "triaxial", "budget_bits": 5.0, "horizon": 1024, "dense_dtype": "float32"}
WORK, GROWING = mixed_work(seed=5), growing_work(seed=6)
SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 150,
    "max_model_len": 512,
    "max_num_batched_tokens": 96,
    "scheduler_reserve_full_isl": False,
}


@pytest.fixture
def start_ahead(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    configure = config.configure

    def with_async(vllm_config: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        configure(vllm_config)

    def begin(settings: dict[str, Any], **arguments: Any) -> Engine:
        monkeypatch.setattr(config, "configure", with_async)
        engine = start(settings, **arguments)
        monkeypatch.setattr(config, "configure", configure)
        assert isinstance(engine.scheduler, AsyncScheduler) and engine.core.batch_queue_size == 2
        engine.core.model_executor.driver_worker.worker.model_runner.use_async_scheduling = False
        return engine

    return begin


@pytest.mark.parametrize(("work", "arguments"), [(WORK, {}), (GROWING, SMALL)], ids=["hits", "preemption"])
def test_the_same_tokens_a_step_ahead(
    start: Callable[..., Engine], start_ahead: Callable[..., Engine], work: Any, arguments: dict[str, Any]
) -> None:
    want = tokens(start(SETTINGS, **arguments).alone(work))
    engine = start_ahead(SETTINGS, **arguments)
    unknown: list[int] = []
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        unknown.append(sum(r.num_output_placeholders for r in engine.scheduler.running))
        return schedule(*args, **kwargs)

    engine.scheduler.schedule = watched
    for wave in (work, work[::-1]):
        assert tokens(engine.run(wave)) == [want[work.index(item)] for item in wave]
    assert max(unknown) > 3, "steps were scheduled before tokens of the last were known"
    assert not arguments or engine.seen.preempted > 3


def test_pages_age_a_step_ahead(start_ahead: Callable[..., Engine]) -> None:
    """A request has ended while its last step is under way: its pages give up planes when the next step is scheduled, not before."""
    engine = start_ahead(SETTINGS | {"ageing": "INT2"}, **SMALL)
    frames = engine.scheduler.frames
    for wave in (GROWING, GROWING[::-1]):
        assert [len(r.tokens) for r in engine.run(wave)] == [n for _, n in wave]
    assert frames.cached.demoted > 10 and frames.cached.broken == 0 and engine.seen.preempted > 3
