"""Decode attention straight from stored pages, and the merge of its parts (Triton). Knows nothing of stores or policies.

One launch attends the pages of every tier: each program is one warp and takes a part of one sequence's pages for one KV head, tier
after tier, so that there is no branch on precision inside its loops. How the pages are cut follows from the counts on the device and
from what pages of a tier cost. A second launch merges the parts and rotates the output back.
"""

import dataclasses
import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstrata.ops import arguments, backend
from kvstrata.ops.arguments import TIERS
from kvstrata.ops.attend_kernel import attend_dense, attend_planes
from kvstrata.ops.merge_kernel import merge_kernel
from kvstrata.ops.table import PageTable
from kvstrata.types import Tier

COSTS = {Tier.BF16: 80, Tier.INT8: 48, Tier.INT4: 27, Tier.INT3: 23, Tier.INT2: 20}
"""What a page costs a program, relative to the others (planes: measured on an H200; BF16: an estimate)."""
NUM_STAGES = 3
PROGRAMS_PER_SM = 8
"""What 255 registers leave room for."""


# ---- who does what ------------------------------------------------------------------------------------------------------------


@triton.jit
def cost_of(counts_ptr, offs_b, batch, COST: tl.constexpr, PRESENT: tl.constexpr):
    """Cost of a tier's pages of each sequence, int32."""
    if PRESENT:
        out = tl.load(counts_ptr + offs_b, mask=offs_b < batch, other=0) * COST
    else:
        out = tl.zeros_like(offs_b)
    return out


@triton.jit
def run_of(begin, end, before, cost, COST: tl.constexpr):
    """Pages of a tier, whose costs lie in [before, before + cost) of a sequence's, that start in [begin, end)."""
    count = cost // COST
    lo = tl.minimum((tl.maximum(begin - before, 0) + COST - 1) // COST, count)
    hi = tl.minimum((tl.maximum(end - before, 0) + COST - 1) // COST, count)
    return lo.to(tl.int32), hi.to(tl.int32)


@triton.jit
def nothing(stat_ptr):
    tl.store(stat_ptr + tl.arange(0, 16), tl.full([16], -1e30, tl.float32))
    tl.store(stat_ptr + 16 + tl.arange(0, 16), tl.zeros([16], tl.float32))


@triton.jit
def pick(x, offs_b, b):
    return tl.sum(tl.where(offs_b == b, x, 0), 0)


@triton.jit(do_not_specialize=["batch", "group", "rows16", "rows8", "rows4", "rows3", "rows2"])
def decode_kernel(q_ptr, arena_ptr, dense_ptr, part_ptr, stat_ptr, plan_ptr,
                  frames16_ptr, counts16_ptr, live16_ptr, rows16, heads16,
                  frames8_ptr, counts8_ptr, live8_ptr, rows8, heads8,
                  frames4_ptr, counts4_ptr, live4_ptr, rows4, heads4,
                  frames3_ptr, counts3_ptr, live3_ptr, rows3, heads3,
                  frames2_ptr, counts2_ptr, live2_ptr, rows2, heads2,
                  batch, group, qk_scale, stride_frame, stride_head,
                  HAS16: tl.constexpr, HAS8: tl.constexpr, HAS4: tl.constexpr, HAS3: tl.constexpr, HAS2: tl.constexpr,
                  LIVE16: tl.constexpr, LIVE8: tl.constexpr, LIVE4: tl.constexpr, LIVE3: tl.constexpr, LIVE2: tl.constexpr,
                  COST16: tl.constexpr, COST8: tl.constexpr, COST4: tl.constexpr, COST3: tl.constexpr, COST2: tl.constexpr,
                  N16: tl.constexpr, CHUNKS: tl.constexpr, LEAST: tl.constexpr, BATCH: tl.constexpr,
                  G: tl.constexpr, D: tl.constexpr, CB: tl.constexpr, DB: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """grid (H, parts a head). q [B, Hq, D]; part [H, parts, S, group, D] and stat [H, parts, S, 2, 16] float32, S the number of tiers:
    sum of p * v, and (largest logit, sum of p) of each head; plan int32 [2, B]: first part and number of parts of each sequence.
    rowsT: pages of a row of tier T's table; headsT: KV heads of its live masks, 1 or H. Strides count 16-bit words.

    A sequence's pages, tier after tier, are a line of costs, cut into equal parts: a part may end in one tier and go on in the next."""
    S: tl.constexpr = HAS16 + HAS8 + HAS4 + HAS3 + HAS2
    head = tl.program_id(0)
    slot = tl.program_id(1)
    slots = tl.num_programs(1)
    offs_b = tl.arange(0, BATCH)
    cost16 = cost_of(counts16_ptr, offs_b, batch, COST16, HAS16)
    cost8 = cost_of(counts8_ptr, offs_b, batch, COST8, HAS8)
    cost4 = cost_of(counts4_ptr, offs_b, batch, COST4, HAS4)
    cost3 = cost_of(counts3_ptr, offs_b, batch, COST3, HAS3)
    cost2 = cost_of(counts2_ptr, offs_b, batch, COST2, HAS2)
    cost = cost16 + cost8 + cost4 + cost3 + cost2
    total = tl.maximum(tl.sum(cost.to(tl.float32), 0), 1.0)
    spare = slots - tl.sum((cost > 0).to(tl.int32), 0)
    # one for each sequence, and shares of the rest, rounded down a little too far, so that the sum never exceeds what there is
    parts = 1 + (cost.to(tl.float32) * spare / total * 0.99999).to(tl.int32)
    parts = tl.where(cost > 0, tl.minimum(parts, (cost + LEAST - 1) // LEAST), 0)
    ends = tl.cumsum(parts, 0)
    if (head == 0) & (slot == 0):
        tl.store(plan_ptr + offs_b, ends - parts, mask=offs_b < batch)
        tl.store(plan_ptr + batch + offs_b, parts, mask=offs_b < batch)
    b = tl.sum((ends <= slot).to(tl.int32), 0)
    if b < batch:
        index = (slot - pick(ends - parts, offs_b, b)).to(tl.int64)
        whole = pick(cost, offs_b, b)
        share = pick(parts, offs_b, b)
        begin = whole * index // share
        end = whole * (index + 1) // share
        heads = tl.num_programs(0)
        q_ptr += (b * heads + head).to(tl.int64) * (group * D)
        row = (head * slots + slot).to(tl.int64) * S
        part_ptr += row * (group * D)
        stat_ptr += row * 32
        arena_ptr += head * stride_head
        dense_ptr += head * stride_head
        before = 0
        if HAS16:
            own = pick(cost16, offs_b, b)
            lo, hi = run_of(begin, end, before, own, COST16)
            if lo < hi:
                first_page = (b * rows16).to(tl.int64)
                attend_dense(q_ptr, dense_ptr, frames16_ptr + first_page * N16, live16_ptr + first_page * heads16 + head % heads16, part_ptr, stat_ptr,
                     lo, hi, group, qk_scale, stride_frame, heads16, N16, CHUNKS, LIVE16, G, D, DB, ASM)  # fmt: skip
            else:
                nothing(stat_ptr)
            part_ptr += group * D
            stat_ptr += 32
            before += own
        if HAS8:
            own = pick(cost8, offs_b, b)
            lo, hi = run_of(begin, end, before, own, COST8)
            if lo < hi:
                first_page = (b * rows8).to(tl.int64)
                attend_planes(q_ptr, arena_ptr, frames8_ptr + first_page * 8, live8_ptr + first_page * heads8 + head % heads8, part_ptr, stat_ptr,
                     lo, hi, group, qk_scale, stride_frame, heads8, 4, 4, LIVE8, G, D, CB, ASM)  # fmt: skip
            else:
                nothing(stat_ptr)
            part_ptr += group * D
            stat_ptr += 32
            before += own
        if HAS4:
            own = pick(cost4, offs_b, b)
            lo, hi = run_of(begin, end, before, own, COST4)
            if lo < hi:
                first_page = (b * rows4).to(tl.int64)
                attend_planes(q_ptr, arena_ptr, frames4_ptr + first_page * 4, live4_ptr + first_page * heads4 + head % heads4, part_ptr, stat_ptr,
                     lo, hi, group, qk_scale, stride_frame, heads4, 2, 2, LIVE4, G, D, CB, ASM)  # fmt: skip
            else:
                nothing(stat_ptr)
            part_ptr += group * D
            stat_ptr += 32
            before += own
        if HAS3:
            own = pick(cost3, offs_b, b)
            lo, hi = run_of(begin, end, before, own, COST3)
            if lo < hi:
                first_page = (b * rows3).to(tl.int64)
                attend_planes(q_ptr, arena_ptr, frames3_ptr + first_page * 3, live3_ptr + first_page * heads3 + head % heads3, part_ptr, stat_ptr,
                     lo, hi, group, qk_scale, stride_frame, heads3, 2, 1, LIVE3, G, D, CB, ASM)  # fmt: skip
            else:
                nothing(stat_ptr)
            part_ptr += group * D
            stat_ptr += 32
            before += own
        if HAS2:
            own = pick(cost2, offs_b, b)
            lo, hi = run_of(begin, end, before, own, COST2)
            if lo < hi:
                first_page = (b * rows2).to(tl.int64)
                attend_planes(q_ptr, arena_ptr, frames2_ptr + first_page * 2, live2_ptr + first_page * heads2 + head % heads2, part_ptr, stat_ptr,
                     lo, hi, group, qk_scale, stride_frame, heads2, 1, 1, LIVE2, G, D, CB, ASM)  # fmt: skip
            else:
                nothing(stat_ptr)
            part_ptr += group * D
            stat_ptr += 32
            before += own


# ---- the op -------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """What a call of `decode_triton` writes. part float32 [H, parts, tiers, Hq / H, D], stat float32 [H, parts, tiers, 2, 16], plan int32 [2, B],
    out [B, Hq, D], lse float32 [B, Hq]. A call with a workspace allocates nothing; its results are the workspace's out and lse."""

    part: Tensor
    stat: Tensor
    plan: Tensor
    out: Tensor
    lse: Tensor


@functools.cache
def _programs(index: int) -> int:
    """Programs that a GPU runs at once."""
    return torch.cuda.get_device_properties(index).multi_processor_count * PROGRAMS_PER_SM


def make_workspace(q: Tensor, num_kv_heads: int, num_tiers: int = len(TIERS), parts: int | None = None) -> Workspace:
    """Room for calls with queries like q [B, Hq, D], whatever the counts. parts: programs a KV head (default: one wave of the GPU)."""
    b, hq, d = q.shape
    if parts is None:
        parts = _programs(q.device.index or 0) // num_kv_heads if q.is_cuda else 6
    parts = max(parts, b)
    new = functools.partial(torch.empty, device=q.device)
    return Workspace(new(num_kv_heads, parts, num_tiers, hq // num_kv_heads, d), new(num_kv_heads, parts, num_tiers, 2, 16), new(2, b, dtype=torch.int32),
                     new(b, hq, d, dtype=q.dtype), new(b, hq))  # fmt: skip


def decode_triton(q: Tensor, arena: Tensor, table: PageTable, scale: float, *, dense_dtype: torch.dtype, rotated: bool = True,
                  workspace: Workspace | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`decode` by Triton. Nothing is read back from the device and, with a workspace, nothing allocated: a CUDA graph may hold it, and
    the table's tensors may change between replays. Raises ValueError for what the kernel does not do."""
    b, hq, d = q.shape
    h = arena.shape[1]
    group = hq // h
    arguments.check(q, h, arena, dense_dtype)
    frame_bytes = arena.shape[2]
    w = workspace or make_workspace(q, h, max(len(table.segments), 1))
    if not b:
        return w.out, w.lse
    words, dense = arena.view(torch.uint16), arena.view(dense_dtype)
    args = arguments.of_tiers(table, w.plan, 1)
    has, live = [n > 0 for n in args[3::5]], [mask is not w.plan for mask in args[2::5]]
    parts = w.part.shape[1]
    cb = max(16, triton.next_power_of_2(d // 8))
    n16 = -(-128 * d // frame_bytes)
    decode_kernel[(h, parts)](
        q.contiguous(), words, dense, w.part, w.stat, w.plan, *args, b, group, scale * math.log2(math.e), words.stride(0), words.stride(1),
        *has, *live, *(COSTS[t] for t in TIERS), N16=n16, CHUNKS=frame_bytes // 16, LEAST=4 * COSTS[Tier.INT2], BATCH=max(32, triton.next_power_of_2(b)),
        G=8 if group <= 8 else 16, D=d, CB=cb, DB=triton.next_power_of_2(d), ASM=not backend.interpreting(),
        num_warps=1, num_stages=NUM_STAGES,
    )  # fmt: skip
    tiers = sum(has)
    step = min(max(triton.next_power_of_2(-(-parts * tiers // b)), 8), 64)
    merge_kernel[(b, hq)](w.part, w.stat, w.plan, w.out, w.lse, b, group, parts, S=tiers, D=d, DB=triton.next_power_of_2(d),
                          ROTATION=d & -d if rotated else 0, STEP=step, num_warps=8 if step > 16 else 4)  # fmt: skip
    return w.out, w.lse
