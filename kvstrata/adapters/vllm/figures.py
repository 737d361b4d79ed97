"""Figures of a running engine, left by its scheduler for the server: one file, replaced as a whole. Knows nothing of any engine."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

INTERVAL = 0.2
"""Seconds between two writings at least."""


@dataclass(frozen=True, slots=True)
class Figures:
    """frames, held_frames: of the pool, and of them held by requests. frame_bytes: of one frame in all layers of this rank.
    capacity_tokens: that the pool holds when every request is as long as can be; bf16_tokens: that as many bytes hold in bfloat16.
    tokens: of running requests' settled pages, by tier, shared pages once for each. computed_tokens: of running requests.
    found_pages, broken_pages: taken from the prefix cache, and found there with a frame gone, since the start.
    demoted_pages, dropped_pages: times that a page of the cache gave up planes, and pages that it lost, since the start.
    cached_pages: that can be found, by tier, those that requests hold among them."""

    frames: int = 0
    held_frames: int = 0
    frame_bytes: int = 0
    capacity_tokens: int = 0
    bf16_tokens: int = 0
    computed_tokens: int = 0
    found_pages: int = 0
    broken_pages: int = 0
    demoted_pages: int = 0
    dropped_pages: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    cached_pages: dict[str, int] = field(default_factory=dict)


HELP = {
    "frames": "Frames of the KV cache pool.",
    "held_frames": "Frames that requests hold.",
    "frame_bytes": "Bytes of a frame in all layers of this rank.",
    "capacity_tokens": "Tokens that the pool holds when every request is as long as can be.",
    "bf16_tokens": "Tokens that as many bytes hold in bfloat16.",
    "computed_tokens": "Tokens of running requests.",
    "found_pages": "Pages taken from the prefix cache.",
    "broken_pages": "Pages of the prefix cache of which a frame was gone.",
    "demoted_pages": "Times that a page of the prefix cache gave up planes.",
    "dropped_pages": "Pages that the prefix cache lost, for their frames were wanted.",
    "tokens": "Tokens of running requests' settled pages, by tier.",
    "cached_pages": "Pages of the prefix cache, by tier.",
}
COUNTERS = ("found_pages", "broken_pages", "demoted_pages", "dropped_pages")
BY_TIER = ("tokens", "cached_pages")


def figures_path(instance: str, rank: int) -> Path:
    """Where the scheduler of a data-parallel rank of this instance of the engine leaves its figures."""
    return Path(tempfile.gettempdir()) / f"kvstrata-{os.getuid()}-{instance}-{rank}.json"


class Writer:
    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock, self._next = path, clock, 0.0

    def write(self, make: Callable[[], Figures], *, last: bool = False) -> None:
        """Write what `make` gives, unless that was done just now. last: nothing may follow for long, so it is written all the same."""
        now = self._clock()
        if now < self._next and not last:
            return
        self._next = now + INTERVAL
        new = self._path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(asdict(make())), encoding="utf-8")
        new.replace(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def read(path: Path) -> Figures | None:
    """None where no scheduler has written yet, or has ended."""
    try:
        return Figures(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class Collector:
    """A collector of prometheus_client over the files of some ranks."""

    def __init__(self, paths: dict[str, Path], labels: dict[str, str]) -> None:
        """paths: by rank. labels: of every sample."""
        self._paths, self._labels = paths, labels

    def collect(self) -> list[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names = [*self._labels, "engine"]
        families: dict[str, Any] = {}
        for name, text in HELP.items():
            family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            families[name] = family(f"kvstrata_{name}", text, labels=[*names, *(["tier"] if name in BY_TIER else [])])
        for rank, path in self._paths.items():
            found = read(path)
            for name, value in asdict(found).items() if found is not None else ():
                samples = value.items() if name in BY_TIER else [(None, value)]
                for tier, number in samples:
                    families[name].add_metric([*self._labels.values(), rank, *([tier] if tier else [])], number)
        return list(families.values())
