"""The PyTorch path on a CPU against transformers' own cache: prefill and decode at a context length, ratios of one process.

    python -m benchmarks.bench_cpu --model models/smollm2 --tokens 4096 --out benchmarks/results/cpu.json

Both caches run in turn, pass by pass, so that a machine whose speed drifts slows both; medians are compared. Logits are compared
before anything is timed. Peak memory is that of a process each (--memory): resident set, not a formula.
"""

import argparse
import ctypes
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvstrata.adapters.hf import StrataCache, attached, cache_keyword, store_config
from kvstrata.store.store import Store
from kvstrata.types import Plan, Tier

Times = tuple[float, float]
"""Seconds of wall clock, and of CPU over all threads: what is left comparable on a machine that others use too."""


def timed(model: Any, ids: torch.Tensor, cache: Any, keep: int = 1) -> tuple[Times, torch.Tensor]:
    wall, cpu = time.perf_counter(), time.process_time()
    logits = model(input_ids=ids, logits_to_keep=keep, **{cache_keyword(model): cache}).logits
    return (time.perf_counter() - wall, time.process_time() - cpu), logits


@torch.no_grad()
def speed(model: Any, tokens: int, tier: Tier, prefills: int, steps: int) -> dict[str, Any]:
    ids = torch.randint(1000, model.config.vocab_size // 2, (1, tokens + steps), generator=torch.Generator().manual_seed(0))
    plan = Plan((Tier.BF16,), tier)
    pre: list[tuple[Times, Times]] = []
    for _ in range(prefills):
        store = Store(store_config(model, tokens + steps))
        dense, strata = DynamicCache(), StrataCache(model, store, lambda _: plan)
        a, reference = timed(model, ids[:, :tokens], dense)
        with attached(model, store, cache=strata):
            b, logits = timed(model, ids[:, :tokens], strata)
        # a prefill of one chunk attends itself in floating point
        assert (logits - reference).abs().max() < 1e-2 * reference.abs().max()
        pre.append((a, b))
    decode: list[tuple[Times, Times]] = []
    for i in range(tokens, tokens + steps):
        a, reference = timed(model, ids[:, i : i + 1], dense)
        with attached(model, store, cache=strata):
            b, logits = timed(model, ids[:, i : i + 1], strata)
        decode.append((a, b))
    out: dict[str, Any] = {"tier": tier.name, "tokens": tokens, "bits_per_element": store.bits_per_element()}
    for name, pairs in (("prefill", pre), ("decode", decode)):
        out |= {
            f"{name}_seconds_transformers": statistics.median(a[0] for a, _ in pairs),
            f"{name}_seconds": statistics.median(b[0] for _, b in pairs),
            f"{name}_ratio": statistics.median(b[0] / a[0] for a, b in pairs),
            f"{name}_cpu_ratio": statistics.median(b[1] / a[1] for a, b in pairs),
        }
    return out


@torch.no_grad()
def resident(model: Any, tokens: int, tier: Tier | None) -> int:
    """Bytes by which the resident set grew when `tokens` tokens were cached; tier None: transformers' own cache, in bfloat16."""
    config = model.config
    ids = torch.randint(1000, config.vocab_size // 2, (1, tokens), generator=torch.Generator().manual_seed(0))

    def rss() -> int:
        gc.collect()
        # what the allocator keeps of freed temporaries is not the cache's
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    if tier is None:
        cache = DynamicCache()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        before = rss()
        for layer in range(config.num_hidden_layers):
            x = torch.randn(1, config.num_key_value_heads, tokens, head_dim).bfloat16()
            cache.update(x, x + 1, layer)
            del x
        return rss() - before
    store = Store(store_config(model, tokens))
    before = rss()
    i = store.add_sequence(Plan((Tier.BF16,), tier))
    step = store.begin([i], ids.tolist())
    c = store.config
    for layer in range(c.num_layers):
        step.write(layer, torch.randn(tokens, c.num_kv_heads, c.head_dim), torch.randn(tokens, c.num_kv_heads, c.head_dim))
    step.commit()
    return rss() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--prefills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--tiers", nargs="+", default=["INT4", "INT2"])
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time, a process for each cache")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
        # a first, small run: lookup tables and allocator pools are not the cache's
        resident(model, 256, Tier.INT4)
        print(resident(model, args.tokens, None if args.one == "bf16" else Tier.parse(args.one)))
        return
    results: list[dict[str, Any]] = []
    if args.memory:
        for name in ("bf16", *args.tiers):
            command = [sys.executable, "-m", "benchmarks.bench_cpu", "--model", args.model, "--tokens", str(args.tokens), "--one", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results.append({"cache": name, "tokens": args.tokens, "resident_bytes": int(done.stdout.split()[-1])})
        for r in results:
            r["fraction_of_bf16"] = r["resident_bytes"] / results[0]["resident_bytes"]
            print(r, flush=True)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        for name in args.tiers:
            results.append(speed(model, args.tokens, Tier.parse(name), args.prefills, args.steps))
            print(results[-1], flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        args.out.write_text(json.dumps({"model": Path(args.model).name, "versions": versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
