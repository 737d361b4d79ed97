"""Decode over anchors in the geometry of Qwen3-8B, beside the best bf16 kernel: HyQuant's Tables 6 to 8, attention alone.

    python -m benchmarks.bench_hyquant [--fa3 path/of/_vllm_fa3_C.abi3.so] [--no-decode]

A layer's attention is timed and multiplied by 36; nothing else of the model runs. A sequence has a sink page and the window of 128 tokens,
at its mean width, 192, in BF16; of the other tokens 5% are anchors, each KV head its own, and the rest, their bits cleared, INT2 or INT4.
"""

import argparse
import json
import statistics
import time

import torch

from benchmarks.baselines import best_bf16, fa3
from benchmarks.bench_decode import HEAD_DIM, HEADS, kernels
from benchmarks.common import RESULTS, check, copy_bandwidth, microseconds, random_arena, relative_error, save, softmax_scale
from kvstrata.config import StoreConfig
from kvstrata.ops.decode import decode, decode_ref
from kvstrata.policy import Signals, make_policy
from kvstrata.store.layout import Layout
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Plan, Tier

GROUP, LAYERS, RHO = 4, 36, 0.05
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 4, 8, 16, 32)
SETTINGS = ((Tier.INT2, Tier.BF16), (Tier.INT2, Tier.INT8), (Tier.INT4, Tier.BF16))
WHOLE = 1 + 192 // PAGE_SIZE
"""Pages of sink and window."""


def counts(tokens: int, batch: int, tier: Tier, anchor_tier: Tier) -> dict[Tier, list[int]]:
    body = tokens // PAGE_SIZE - WHOLE
    anchors = -(-int(RHO * body * PAGE_SIZE) // PAGE_SIZE)
    pages = {Tier.BF16: WHOLE, tier: body}
    pages[anchor_tier] = pages.get(anchor_tier, 0) + anchors
    return {t: [n] * batch for t, n in pages.items()}


def live(tier: Tier) -> dict[Tier, float]:
    return {tier: 1 - RHO, Tier.BF16: 1.0}


def choosing(tokens: int) -> dict[str, object]:
    """Microseconds of one layer's `Step.write` in decoding one sequence, on the device, and of the whole step of a store of one layer, by
    the clock: where anchors are chosen anew, and where they are not."""
    geometry = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": HEAD_DIM, "window": 128}
    layout = Layout.of(StoreConfig(**geometry, num_frames=2))
    store = Store(StoreConfig(**geometry, num_frames=2 * layout.frames_for(tokens + 1024)), "cuda")
    policy = make_policy("hyquant", tier=Tier.INT2)

    def plan(n: int) -> Plan:
        return policy.plan((), n, Signals(window_pages=-(-n // PAGE_SIZE) - store.first_window_page(n)))

    sequence, times = store.add_sequence(plan(tokens)), {}
    for i, new in enumerate([tokens] + [1] * 160):
        q, k, v = (torch.randn(new, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for n in (HEADS * GROUP, HEADS, HEADS))
        torch.cuda.synchronize()
        start = time.perf_counter()
        step = store.begin([sequence], [[i] * new])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step.write(0, k, v, q, softmax_scale(HEAD_DIM))
        end.record()
        chosen = store.sequence(sequence).chosen_at
        step.commit()
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        store.set_plan(sequence, plan(tokens + i + 1))
        kind = new, store.sequence(sequence).chosen_at != chosen
        times.setdefault(kind, []).append((begin.elapsed_time(end) * 1e3, took * 1e6))
    out: dict[str, object] = {"tokens": tokens}
    for name, kind in (("choose", (1, True)), ("plain", (1, False))):
        write, step_us = (statistics.median(x) for x in zip(*times[kind], strict=True))
        out |= {f"{name}_us": write, f"{name}_step_us": step_us}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fa3", help="path of vLLM's _vllm_fa3_C.abi3.so: adds FlashAttention 3 with a paged bf16 cache")
    parser.add_argument("--decode", action=argparse.BooleanOptionalAction, default=True, help="whether decode is timed, or choosing alone")
    options, _ = parser.parse_known_args()
    for tier, anchor_tier in SETTINGS:
        arena, table, _ = random_arena(counts(2048, 2, tier, anchor_tier), HEADS, HEAD_DIM, live_fraction=live(tier))
        q = torch.randn(2, HEADS * GROUP, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        out, ref = (f(q, arena, table, 1.0, dense_dtype=torch.bfloat16)[0] for f in (decode, decode_ref))
        check(f"{tier.name} with anchors at {anchor_tier.name}", relative_error(out, ref), 6e-3)
    writes = []
    for tokens in (8192, 32768):
        choosing(tokens)  # what runs for the first time takes long
        writes.append(choosing(tokens))
    for row in writes:
        print(
            f"{row['tokens']}: writing a layer's token {row['plain_us']:.0f} us, with choosing anchors {row['choose_us']:.0f} us; "
            f"steps {row['plain_step_us']:.0f} and {row['choose_step_us']:.0f} us",
            flush=True,
        )
    if not options.decode:
        path = RESULTS / "hyquant_decode.json"
        save("hyquant_decode", [row for row in json.loads(path.read_text())["rows"] if "choose_us" not in row] + writes)
        return
    copy, scale = copy_bandwidth(), softmax_scale(HEAD_DIM)
    rows: list[dict[str, object]] = []
    for tokens in TOKENS:
        for batch in BATCHES:
            q = torch.randn(batch, HEADS * GROUP, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            base = best_bf16(q, HEADS, tokens)
            if options.fa3:
                base["fa3"] = microseconds(fa3(q, HEADS, tokens, options.fa3), budget_ms=20)
            bf16 = min(base.values())
            line = []
            for tier, anchor_tier in SETTINGS:
                arena, table, moved = random_arena(counts(tokens, batch, tier, anchor_tier), HEADS, HEAD_DIM, live_fraction=live(tier))
                name, run = next(iter(kernels(q, arena, table, scale).items()))
                us = microseconds(run, budget_ms=20)
                row = {"tokens": tokens, "batch": batch, "tier": tier.name, "anchors": anchor_tier.name, "kernel": name, "us": us}
                row |= {"bf16_us": bf16, "over_bf16": us / bf16, "percent_of_floor": 100 * moved / copy * 1e6 / us}
                row |= {"ms_36_layers": LAYERS * us / 1e3, "tokens_a_second": batch / (LAYERS * us) * 1e6}
                row |= {"bf16_tokens_a_second": batch / (LAYERS * bf16) * 1e6} | {f"{n}_us": t for n, t in base.items()}
                rows.append(row)
                line.append(f"{tier.name}+{anchor_tier.name} {us:.1f} ({us / bf16:.2f})")
                del arena, table, run
            print(f"{tokens} x {batch}: bf16 {bf16:.1f} us; " + ", ".join(line), flush=True)
        save("hyquant_decode", rows + writes)


if __name__ == "__main__":
    main()
