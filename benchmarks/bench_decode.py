"""Decode over stored pages: time, bytes moved and percent of the floor, beside bf16, fp8 and a plain low-bit kernel.

    python -m benchmarks.bench_decode [--fa3 path/of/_vllm_fa3_C.abi3.so] [--quick] [--triton]

Timed is the kernel that `decode` runs (KVSTRATA_BACKEND), with a workspace; --triton times Triton's beside it.
floor: the bytes that the pages hold (planes and metadata) over copy bandwidth, measured in the same process.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.baselines import best_bf16, fa3_fp8, plain_int4
from benchmarks.common import check, copy_bandwidth, microseconds, random_arena, relative_error, save, softmax_scale
from kvstrata.ops import backend, decode_cuda, decode_kernel
from kvstrata.ops.decode import decode, decode_ref
from kvstrata.ops.table import PageTable
from kvstrata.types import PAGE_SIZE, Tier

HEADS, HEAD_DIM = 8, 128


@dataclasses.dataclass(frozen=True)
class Setting:
    """Shares of the pages by tier. `realistic`: the sink page and three of the window in BF16, 2% of the tokens as anchors (a dense page
    holds 32 of them), a quarter of the other pages INT3, the rest INT2."""

    name: str
    shares: dict[Tier, float]
    realistic: bool = False

    def counts(self, pages: int, batch: int) -> dict[Tier, list[int]]:
        if self.realistic:
            body = max(pages - 4, 0)
            dense = min(pages, 4) + round(0.02 * body)
            return {Tier.BF16: [dense] * batch, Tier.INT3: [body // 4] * batch, Tier.INT2: [body - body // 4] * batch}
        left, out = pages, {}
        for tier, share in list(self.shares.items())[1:]:
            out[tier] = [round(share * pages)] * batch
            left -= out[tier][0]
        return {next(iter(self.shares)): [left] * batch} | out

    def live(self) -> dict[Tier, float]:
        return {Tier.BF16: 0.97, Tier.INT3: 0.98, Tier.INT2: 0.98} if self.realistic else {}


SETTINGS = (
    Setting("INT2", {Tier.INT2: 1.0}),
    Setting("INT3", {Tier.INT3: 1.0}),
    Setting("INT4", {Tier.INT4: 1.0}),
    Setting("30% INT4, 70% INT2", {Tier.INT2: 0.7, Tier.INT4: 0.3}),
    Setting("realistic", {}, realistic=True),
)
SHAPES = (
    (8, 32768, 4), (32, 8192, 4), (1, 131072, 4), (1, 8192, 4), (1, 32768, 4), (1, 65536, 4), (8, 32768, 8), (1, 1024, 4), (64, 4096, 4),
)  # fmt: skip
"""Sequences, tokens each, query heads to a KV head."""


def kernels(q: Tensor, arena: Tensor, table: PageTable, scale: float) -> dict[str, Callable[[], object]]:
    """By name, the kernels that do this shape, each with its workspace: the one that `decode` runs first."""
    out: dict[str, Callable[[], object]] = {}
    if backend.use_cuda(q) and decode_cuda.supports(q, HEADS, torch.bfloat16):
        space = decode_cuda.make_workspace(q, HEADS)
        out["cuda"] = partial(decode_cuda.decode_cuda, q, arena, table, scale, dense_dtype=torch.bfloat16, workspace=space)
    room = decode_kernel.make_workspace(q, HEADS, len(table.segments))
    out["triton"] = partial(decode_kernel.decode_triton, q, arena, table, scale, dense_dtype=torch.bfloat16, workspace=room)
    return out


def check_all(group: int) -> None:
    """Against the reference on a ragged batch, before anything is timed."""
    for setting in SETTINGS:
        counts = {t: [c[0], c[0] // 3] for t, c in setting.counts(96, 2).items()}
        arena, table, _ = random_arena(counts, HEADS, HEAD_DIM, live_fraction=setting.live())
        q = torch.randn(2, HEADS * group, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        out, _ = decode(q, arena, table, 1.0, dense_dtype=torch.bfloat16)
        ref, _ = decode_ref(q, arena, table, 1.0, dense_dtype=torch.bfloat16)
        # both outputs are rounded to bfloat16
        check(f"{setting.name}, {group} query heads a KV head", relative_error(out, ref), 6e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fa3", help="path of vLLM's _vllm_fa3_C.abi3.so: adds FlashAttention 3 with a paged fp8 cache")
    parser.add_argument("--quick", action="store_true", help="the first three shapes only")
    parser.add_argument("--triton", action="store_true", help="times Triton's kernel too, where it is not the one that decode runs")
    options = parser.parse_args()
    for group in (4, 8):
        check_all(group)
    copy, scale = copy_bandwidth(), softmax_scale(HEAD_DIM)
    rows: list[dict[str, object]] = []
    for batch, tokens, group in SHAPES[:3] if options.quick else SHAPES:
        q = torch.randn(batch, HEADS * group, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        base = best_bf16(q, HEADS, tokens)
        bf16 = min(base.values())
        if options.fa3:
            base["fa3_fp8"] = microseconds(fa3_fp8(q, HEADS, tokens, options.fa3))
        if batch * tokens >= 1 << 18:
            base["plain_int4"] = microseconds(plain_int4(batch, HEADS, tokens, HEAD_DIM))
        print(f"{batch} x {tokens}, group {group}: " + ", ".join(f"{n} {t:.1f} us" for n, t in base.items()), flush=True)
        pure = 0.0
        for setting in SETTINGS:
            counts = setting.counts(tokens // PAGE_SIZE, batch)
            arena, table, moved = random_arena(counts, HEADS, HEAD_DIM, live_fraction=setting.live())
            run = kernels(q, arena, table, scale)
            name, first = next(iter(run.items()))
            us = microseconds(first)
            floor = moved / copy * 1e6
            pure = pure or us
            row = {"batch": batch, "tokens": tokens, "group": group, "setting": setting.name, "kernel": name, "us": us, "bytes": moved}
            row |= {"percent_of_floor": 100 * floor / us, "over_int2": us / pure}
            if options.triton and name != "triton":
                row["triton_us"] = microseconds(run["triton"])
            rows.append(row | {"over_bf16": us / bf16, "bf16_us": bf16} | {f"{n}_us": t for n, t in base.items()})
            beside = f", {base['fa3_fp8'] / us:.2f} x fp8" if options.fa3 else ""
            beside += f", Triton {row['triton_us']:.1f} us" if "triton_us" in row else ""
            ratios = f"{us / bf16:.3f} of bf16, {us / pure:.3f} of INT2{beside}, {100 * floor / us:.0f}% of floor"
            print(f"  {setting.name}: {us:.1f} us, {ratios}", flush=True)
            del arena, table, run
        save("decode", rows)


if __name__ == "__main__":
    main()
