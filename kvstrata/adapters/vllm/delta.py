"""What a scheduler tells its workers about one step. Plain values: they travel between processes. Knows nothing of any engine."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NewPage:
    """A page that a request took in this step: its tier (bits), and its frames in the order of ops/frame.py."""

    tier: int
    frames: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """computed: tokens before the step. pages: taken in this step; the first of them is page `first`. ring: frames of the request's dense
    pages, one after another, if the request begins or resumes: then `pages` holds all it has, found pages included."""

    computed: int
    first: int
    pages: tuple[NewPage, ...]
    ring: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepDelta:
    """By request id, for all requests of the step; and requests that were preempted by it."""

    requests: dict[str, RequestDelta] = field(default_factory=dict)
    preempted: tuple[str, ...] = ()
