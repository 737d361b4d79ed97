"""The engine's schedulers. They lend the manager their requests and tell the workers what pages a step takes."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvstrata.adapters.vllm.delta import StepDelta
from kvstrata.adapters.vllm.v026.manager import FrameManager
from kvstrata.adapters.vllm.v026.metrics import SchedulerFigures
from kvstrata.adapters.vllm.v026.plans import Plans


class Frames(Scheduler):
    """What both schedulers do beyond the engine's own.

    A scheduler that is a step ahead does not know the newest token of a request, but a page settles only once the token after its last is
    computed: all of its own are known by then. Blocks of a request that ended while a step was under way are written once more by that
    step, and by the next only after it: steps run one after another on the device."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(manager, FrameManager), "the layers did not ask for frames"
        self.frames = manager
        # since the last step: the engine preempts between steps too, when its prefix cache is reset
        self._preempted: list[str] = []
        self.plans = Plans(vllm_config, manager.kv_cache_spec, manager.worth)
        manager.lend(self.requests, self.plans)
        self.figures = SchedulerFigures(vllm_config, kv_cache_config, manager)

    def add_request(self, request: Any) -> None:
        self.plans.salt(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        out = super().schedule(*args, **kwargs)
        deltas = {}
        for request_id, new in out.num_scheduled_tokens.items():
            # the scheduler has counted the step's tokens already
            deltas[request_id] = self.frames.take_delta(request_id, self.requests[request_id].num_computed_tokens - new)
        # a field of its own: the dataclass travels to the workers whole
        out.kvstrata = StepDelta(deltas, tuple(self._preempted))
        self._preempted.clear()
        return out

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        if self.log_stats:
            self.figures.write(self.running)
        return super().make_stats(*args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        if done:
            self.frames.cached.clear()
        return done

    def shutdown(self) -> None:
        self.figures.remove()
        super().shutdown()

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        super()._preempt_request(request, timestamp)
        self._preempted.append(request.request_id)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.frames.ends(request.request_id)
        self.plans.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)


class FrameScheduler(Frames):
    """Schedules a step when the one before has ended."""


class AsyncFrameScheduler(Frames, AsyncScheduler):
    """Schedules a step while the one before runs."""
