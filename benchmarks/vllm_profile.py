"""Where an engine's steps spend their time: seconds of every step, and the kernels of a few of prompts and of decoding."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

STEPS, PROMPT_AT, DECODE_AT = 5, 3, 12
"""Steps looked into; from which step of prompts, and from which of decoding."""


@dataclass
class Phase:
    """seen: steps so far. wall: seconds between steps that nothing looked into. kernels: microseconds on the device, by name."""

    at: int
    seen: int = 0
    wall: list[float] = field(default_factory=list)
    looked: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)
    done: bool = False


class StepProfile:
    """Called after each step. A step decodes alone if every request that runs has its first token."""

    def __init__(self) -> None:
        self._phases = {"prompts": Phase(PROMPT_AT), "decoding": Phase(DECODE_AT)}
        self._last = time.perf_counter()
        self._profiler: Any = None
        self._left = 0
        self._phase = ""

    @property
    def done(self) -> bool:
        return all(p.done for p in self._phases.values())

    def __call__(self, engine: Any) -> None:
        now = time.perf_counter()
        scheduler = engine.engine_core.engine_core.scheduler
        decoding = not scheduler.waiting and all(r.num_output_tokens > 0 for r in scheduler.running)
        name = "decoding" if decoding else "prompts"
        phase = self._phases[name]
        if self._profiler is not None:
            self._left -= 1
            if name != self._phase or not self._left:
                self._stop()
        elif name == self._phase:
            phase.wall.append(now - self._last)
        phase.seen += 1
        self._phase = name
        if self._profiler is None and not phase.done and phase.seen >= phase.at and scheduler.running:
            self._begin()
        self._last = time.perf_counter()

    def _begin(self) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else torch.profiler.ProfilerActivity.CPU]
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._left = STEPS
        self._started = time.perf_counter()

    def _stop(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        phase = self._phases[self._phase]
        phase.looked = (time.perf_counter() - self._started) / (STEPS - self._left)
        self._profiler.stop()
        steps = STEPS - self._left
        on_device = torch.cuda.is_available()
        for event in self._profiler.key_averages():
            # calls of the host have no time on the device
            us = event.self_device_time_total if on_device else event.self_cpu_time_total
            if us:
                phase.kernels[event.key] += us / steps
        self._profiler, phase.done = None, True

    def summary(self) -> dict[str, Any]:
        """By phase: median milliseconds of a step, of one that was looked into, of its kernels together, and of the largest kernels."""
        out = {}
        for name, phase in self._phases.items():
            wall = sorted(phase.wall)
            out[name] = {
                "steps": phase.seen, "step_ms": 1e3 * wall[len(wall) // 2] if wall else None, "looked_into_ms": 1e3 * phase.looked,
                "kernels_ms": sum(phase.kernels.values()) / 1e3,
                "largest_ms": {key[:90]: us / 1e3 for key, us in phase.kernels.most_common(16)},
            }  # fmt: skip
        return out
