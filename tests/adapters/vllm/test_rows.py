"""Rows of one token: whatever holds their addresses, as a CUDA graph does, reads what the newest step left there."""

import pytest
import torch
from torch import Tensor

from kvstrata.adapters.vllm.attention import StepPlan
from kvstrata.adapters.vllm.settings import EngineSettings
from kvstrata.types import Tier

from .steps import DIM, HEADS, KV_HEADS, Engine, Request, expected

TIERS = [Tier.BF16, Tier.INT2, Tier.INT4, Tier.INT3, Tier.INT8]
ROWS = 6


def addresses(plan: StepPlan) -> list[int]:
    assert plan.decodes is not None
    d = plan.decodes
    tensors: list[Tensor] = [d.ring_frames, d.places]
    for s in d.table.segments:
        tensors += [s.frames, s.counts, *([] if s.live is None else [s.live])]
    return [x.data_ptr() for x in tensors]


@pytest.mark.parametrize("window", [0, 64])
def test_a_plan_made_before_any_request_serves_every_later_step(window: int) -> None:
    """As a graph does: captured over rows of nobody, it runs again for fewer requests than it has rows, whoever they are."""
    s = EngineSettings(policy="uniform", window=window, dense_dtype="float32")
    engine = Engine(s, slots=ROWS)
    captured = engine.planner.idle(ROWS)
    requests = [Request.random(x, n, TIERS, seed=i) for i, (x, n) in enumerate([("a", 110), ("b", 75), ("c", 150)])]
    for r, n in zip(requests, (40, 5, 80), strict=True):
        engine.step([(r, n)])

    made = engine.planner.plan

    def replayed(work: list[tuple[str, int, int]]) -> StepPlan:
        plan = made(work)
        assert addresses(plan) == addresses(captured)
        return captured

    forward = engine.layer.forward

    def padded(arena: Tensor, plan: StepPlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        n = len(q)
        q, k, v = (torch.cat([x, torch.randn(ROWS - n, h, DIM)]) for x, h in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS)))
        whole, before = torch.full_like(q, torch.nan), arena.clone()
        forward(arena, plan, q, k, v, whole)
        out.copy_(whole[:n])
        assert not whole[n:].any(), "rows of nobody"
        touched = (arena != before).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(touched) <= {0, *(f for r in requests for f in r.ring)}, "their tokens went to the dead slot"

    engine.planner.plan, engine.layer = replayed, Padded(engine, padded)
    while running := [r for r in requests if r.computed < len(r.q)]:
        # the batch's order is not that in which they came
        engine.step([(r, 1) for r in running[::-1]])
    for r in requests:
        torch.testing.assert_close(r.out.double(), expected(r, s.group, torch.float32), atol=2e-5, rtol=1e-4)


class Padded:
    """An engine's layer whose batches have more rows than tokens."""

    def __init__(self, engine: Engine, forward: object) -> None:
        self.prepare, self.forward = engine.layer.prepare, forward


def test_rows_of_a_step_that_has_fewer_are_empty() -> None:
    engine = Engine(EngineSettings(policy="uniform", dense_dtype="float32"), slots=ROWS)
    a = Request.random("a", 70, TIERS, seed=1)
    engine.step([(a, 69)])
    engine.step([(a, 1)])
    whole = engine.planner.rows.idle(ROWS)
    assert not any(s.counts.any() for s in whole.table.segments) and not whole.ring_frames.any()
