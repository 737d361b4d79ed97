"""Requests that run step by step over frames, without an engine: who takes which frames, as an engine's scheduler would say it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstrata.adapters.vllm.attention import LayerAttention, StepPlanner
from kvstrata.adapters.vllm.delta import NewPage, RequestDelta, StepDelta
from kvstrata.adapters.vllm.geometry import stored_pages
from kvstrata.adapters.vllm.settings import EngineSettings
from kvstrata.adapters.vllm.tables import Tables
from kvstrata.ops import quant
from kvstrata.types import PAGE_SIZE, Tier

HEADS, KV_HEADS, DIM = 4, 2, 64


@dataclass
class Request:
    """A request with the tiers that its pages will have, and the q, k, v of all its tokens; out: what attention gave."""

    id: str
    tiers: list[Tier]
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    computed: int = 0
    pages: list[NewPage] = field(default_factory=list)
    ring: tuple[int, ...] = ()
    taken: list[NewPage] = field(default_factory=list)
    """Pages whose frames are chosen already, the first first."""

    @classmethod
    def random(cls, name: str, tokens: int, tiers: Sequence[Tier], seed: int) -> "Request":
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(tokens, h, DIM, generator=g) for h in (HEADS, KV_HEADS, KV_HEADS))
        return cls(name, list(tiers), q, k, v, torch.full((tokens, HEADS, DIM), torch.nan))


class Engine:
    """One layer, one arena; frames are handed out once. A frame that nobody wrote is full of NaN bytes."""

    def __init__(self, settings: EngineSettings, slots: int = 4, num_frames: int = 4000) -> None:
        layout = settings.layout(KV_HEADS, DIM)
        self.frames = {t: layout.frames(t) for t in layout.tiers if t}
        self.group = settings.group
        self.arena = torch.full((num_frames, KV_HEADS, layout.head_frame_bytes), 255, dtype=torch.uint8)
        self.next = itertools.count(1)
        self.dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[settings.dense_dtype or "bfloat16"]
        self.tables = Tables(slots, dict.fromkeys(self.frames, 64), self.frames, self.group, torch.device("cpu"))
        self.planner, self.layer = StepPlanner(self.tables), LayerAttention(DIM, self.dtype, DIM**-0.5)

    def take(self, n: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self.next, n))

    def begin(self, request: Request, found: Sequence[NewPage] = ()) -> None:
        """found: pages that another request left."""
        request.computed, request.pages, request.ring = len(found) * PAGE_SIZE, list(found), ()

    def step(self, work: list[tuple[Request, int]], preempted: Sequence[str] = ()) -> None:
        """work: (request, tokens of this step)."""
        deltas = {}
        for r, n in work:
            first, ring = len(r.pages), None
            if not r.ring:
                first, ring = 0, self.take(self.frames[Tier.BF16] * self.group // PAGE_SIZE)
                r.ring = ring
            for page in range(len(r.pages), stored_pages(r.computed + n, self.group)):
                r.pages.append(r.taken[page] if page < len(r.taken) else NewPage(int(r.tiers[page]), self.take(self.frames[r.tiers[page]])))
            deltas[r.id] = RequestDelta(r.computed, first, tuple(r.pages[first:]), ring)
        self.layer.prepare(self.arena, self.planner.before(self.tables.apply(StepDelta(deltas, tuple(preempted)))))
        plan = self.planner.plan([(r.id, r.computed, n) for r, n in work])
        q, k, v = (torch.cat([getattr(r, x)[r.computed : r.computed + n] for r, n in work]) for x in "qkv")
        out = torch.full_like(q, torch.nan)
        self.layer.forward(self.arena, plan, q, k, v, out)
        for (r, n), part in zip(work, out.split([n for _, n in work]), strict=True):
            r.out[r.computed : r.computed + n] = part
            r.computed += n


def expected(r: Request, group: int, dtype: torch.dtype) -> Tensor:
    """What each query should see, in plain attention: earlier groups at their tiers, its own as it is stored in BF16 pages."""
    n = len(r.q)
    # what BF16 pages hold: V is rotated before it is rounded
    exact_k, exact_v = r.k.to(dtype).double(), quant.rotate(quant.rotate(r.v).to(dtype).float()).double()
    coarse_k, coarse_v = exact_k.clone(), exact_v.clone()
    for page in range(n // PAGE_SIZE):
        rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        if r.tiers[page] is not Tier.BF16:
            frames = quant.encode(r.k[None, rows].to(dtype), quant.rotate(r.v[None, rows]).to(dtype), r.tiers[page])
            k, v = quant.decode(frames, r.tiers[page], DIM)
            coarse_k[rows], coarse_v[rows] = k[0].double(), quant.rotate(v[0]).double()
    out = torch.empty(n, HEADS, DIM, dtype=torch.float64)
    for i in range(n):
        edge = i // group * group
        k, v = (torch.cat([c[:edge], e[edge : i + 1]]) for c, e in ((coarse_k, exact_k), (coarse_v, exact_v)))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        p = (torch.einsum("hd,khd->hk", r.q[i].double(), k) * DIM**-0.5).softmax(-1)
        out[i] = torch.einsum("hk,khd->hd", p, v)
    return out
