"""Every call of a layer's attention and writes once more in PyTorch, on a copy of the arena it began from. Knows nothing of any engine.

Outputs are compared with the reference's and with attention in float64, bytes with the reference's. Each call begins from what the chosen
kernels left, so nothing adds up and no token of a model has a say: what is wrong is wrong in that call. A CUDA graph runs no Python; what
its layers got and gave is copied by the graph itself, and looked at once it has run.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvstrata.adapters.vllm.attention import BeforeStep, LayerAttention, StepPlan
from kvstrata.ops import dense
from kvstrata.ops.decode_cuda import COSTS, LEAST
from kvstrata.ops.write import read_dense
from kvstrata.types import Tier

from .exact import error, exactly, reference

CALL, ROW = 4e-3, 1e-2
"""Errors that a call's outputs may have, and a row's of one head: norms over norms. Rounding to bfloat16 alone is 1e-3 to 2e-3."""
MOVED = 5e-4
"""Of all values of V that are rotated in sums of another order, so many may round to bfloat16's next number."""


@dataclass
class Seen:
    """calls, by kind; tiers that queries saw; the most least shares of a block that a decoding row's pages were; errors of kernels and of
    the reference; values of V that tokens put into rings, and those of them that another order of sums rounds otherwise."""

    calls: Counter[str] = field(default_factory=Counter)
    tiers: set[Tier] = field(default_factory=set)
    most_shares: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    values: int = 0
    moved: int = 0

    def worst(self, what: str, error: float) -> None:
        self.errors[what] = max(self.errors.get(what, 0.0), error)


@dataclass
class Call:
    """A layer's call: what it got, the arena as it was before, the layer's arena, which holds what it left, and out."""

    layer: LayerAttention
    plan: StepPlan
    q: Tensor
    k: Tensor
    v: Tensor
    before: Tensor
    arena: Tensor
    out: Tensor

    @property
    def kind(self) -> str:
        if self.plan.chunks is None:
            return "decode"
        return "chunk" if self.plan.decodes is None else "decode and chunk"


class Shadow:
    """Installed by `patch` for as long as that lasts. wrong: what was found, the first few; empty at the end."""

    def __init__(self, patch: pytest.MonkeyPatch, capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing) -> None:
        self.wrong: list[str] = []
        self.seen = Seen()
        self._capturing = capturing
        self._forward, self._prepare = LayerAttention.forward, LayerAttention.prepare
        self._recorded: list[Call] = []
        self._runs, self._looked_at = torch.zeros(0), torch.zeros(0)
        patch.setattr(LayerAttention, "forward", lambda layer, *args: self.forward(layer, *args))
        patch.setattr(LayerAttention, "prepare", lambda layer, *args: self.prepare(layer, *args))

    def prepare(self, layer: LayerAttention, arena: Tensor, before: BeforeStep) -> None:
        want = arena.clone()
        with reference():
            self._prepare(layer, want, before)
        self._prepare(layer, arena, before)
        self.seen.calls["settle"] += bool(before.pages)
        self._expect(torch.equal(arena[1:], want[1:]), "settled pages differ", before.pages)

    def forward(self, layer: LayerAttention, arena: Tensor, plan: StepPlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if self._capturing():
            q_was, k_was, v_was = (x.clone() for x in (q, k, v))
            before = arena.clone()
            self._poisoned(layer, arena, plan, q, k, v, out)
            self._runs[len(self._recorded)].add_(1)
            self._recorded.append(Call(layer, plan, q_was, k_was, v_was, before, arena, out.clone()))
            return
        if not len(self._runs):
            # before a graph is captured, which would clear them in each replay
            self._runs, self._looked_at = (torch.zeros(256, dtype=torch.int64, device=x) for x in (arena.device, "cpu"))
        before = arena.clone()
        self._poisoned(layer, arena, plan, q, k, v, out)
        call = Call(layer, plan, q, k, v, before, arena, out)
        self.seen.calls[call.kind] += 1
        self._look(call.kind, call)

    def after_step(self) -> None:
        """Look at what graphs ran in the step. Its tables are still there."""
        if self._capturing() or not self._recorded:
            return
        runs = self._runs.to("cpu", copy=True)
        for i in (runs != self._looked_at).nonzero().flatten().tolist():
            self._expect(int(runs[i] - self._looked_at[i]) == 1, "a graph ran twice in a step", i)
            call = self._recorded[i]
            self.seen.calls["replay"] += 1
            self._look("replay", call)
            arena, out = call.before.clone(), torch.full_like(call.out, math.nan)
            self._forward(call.layer, arena, call.plan, call.q, call.k, call.v, out)
            same = torch.equal(out, call.out) and torch.equal(arena[1:], call.arena[1:])
            self._expect(same, "a graph's bits are not those of the same kernels without it", float((out - call.out).abs().max()))
        self._looked_at = runs

    def _poisoned(self, layer: LayerAttention, arena: Tensor, plan: StepPlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        out.fill_(math.nan)
        self._forward(layer, arena, plan, q, k, v, out)

    def _look(self, kind: str, call: Call) -> None:
        want, ref = call.before.clone(), torch.full_like(call.out, math.nan)
        with reference(), exactly() as parts:
            self._forward(call.layer, want, call.plan, call.q, call.k, call.v, ref)
        exact = torch.cat(parts)
        for name, out, truth in (("", call.out, exact), (" from the reference", call.out, ref), (": the reference itself", ref, exact)):
            of_call, of_row = error(out, truth)
            self.seen.worst(f"{kind}{name}", of_call)
            self.seen.worst(f"{kind}, a row{name}", of_row)
            self._expect(of_call < CALL and of_row < ROW, f"{kind}{name}: out differs", (of_call, of_row, tuple(out.shape)))
        self._look_at_bytes(kind, call, want)
        self._count(call.plan)

    def _look_at_bytes(self, kind: str, call: Call, want: Tensor) -> None:
        got, decodes, (d, dtype) = call.arena.clone(), call.plan.decodes, (call.layer.head_dim, call.layer.dense_dtype)
        if decodes is not None:
            # rows of nobody are in the dead slot
            mine = decodes.ring_frames[:, 0] != 0
            ring, token = decodes.ring_frames[mine], decodes.places[mine].long()
            row = torch.arange(len(ring), device=token.device)
            a, b = (read_dense(x, ring, d, dtype)[1][row, token].float() for x in (got, want))
            moved = a != b
            self.seen.values, self.seen.moved = self.seen.values + a.numel(), self.seen.moved + int(moved.sum())
            near = (a - b).abs() <= 2**-7 * b.abs() + 1e-6 * b.abs().amax() if len(row) else ~moved
            self._expect(bool(near.all()), f"{kind}: a token in the ring differs", float((a - b).abs().max()) if len(row) else 0)
            # elsewhere, and but for those roundings, nothing differs
            k, v = read_dense(got, ring, d, dtype)
            v[row, token] = read_dense(want, ring, d, dtype)[1][row, token]
            got[ring.flatten().long()] = dense.to_frames(k, v, got.shape[2]).flatten(0, 1)
            want[ring.flatten().long()] = dense.to_frames(*read_dense(want, ring, d, dtype), got.shape[2]).flatten(0, 1)
        different = (got != want).flatten(1).any(1)[1:].nonzero().flatten() + 1
        self._expect(not len(different), f"{kind}: frames differ", different[:8].tolist())

    def _count(self, plan: StepPlan) -> None:
        tables = [x.table for x in (plan.decodes, plan.chunks) if x is not None]
        self.seen.tiers |= {s.tier for t in tables for s in t.segments if int(s.counts.max()) > 0}
        if plan.chunks is not None:
            self.seen.calls["chunk on pages"] += any(int(s.counts.max()) > (s.tier is Tier.BF16) for s in plan.chunks.table.segments)
        if plan.decodes is not None:
            cost = sum(COSTS[s.tier] * s.counts for s in plan.decodes.table.segments)
            assert isinstance(cost, Tensor)
            self.seen.most_shares = max(self.seen.most_shares, float(cost.max()) / LEAST)

    def _expect(self, right: bool, what: str, where: object) -> None:
        if not right and len(self.wrong) < 40:
            self.wrong.append(f"{what}: {where}")

    def report(self) -> str:
        s = self.seen
        lines = [f"  {what}: {error:.2e}" for what, error in sorted(s.errors.items())]
        head = f"{dict(s.calls)}, tiers {sorted(t.name for t in s.tiers)}, {s.most_shares:.1f} shares, {s.moved} of {s.values} values moved"
        return "\n".join([head, *lines, *self.wrong])
