"""vLLM with strata against its own caches, under one KV byte budget, one process after another on one machine.

    python -m benchmarks.bench_vllm --gib 12 --scenario throughput --input 8192 --output 256     # 48 requests, Qwen3 8B's shape
    python -m benchmarks.bench_vllm --gib 12 --scenario replay --requests 64 --turns 8           # agents
    python -m benchmarks.bench_vllm ... --tensor-parallel 2

Rows are printed as they come and added to benchmarks/results/vllm.json. A process that fails, or takes too long, is a row that says so.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.vllm_load import SETTING, Load

RESULTS = Path(__file__).parent / "results" / "vllm.json"
CACHES = ("auto", "fp8", "int4_per_token_head", SETTING)


def run(load: Load, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.vllm_load", json.dumps(asdict(load))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {**asdict(load), "error": f"not done within {seconds:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    return {**asdict(load), "error": (done.stderr or done.stdout).strip().splitlines()[-8:]}


def line(row: dict[str, Any], base: dict[str, dict[str, Any]]) -> str:
    """A row, and its ratios to bfloat16 and to fp8 where those have run."""
    if "error" in row:
        return f"{row['kv']:20s} {row['error']}"
    key = "turns_a_second" if row["scenario"] == "replay" else "output_tokens_a_second"
    ratios = [f"{row[key] / base[kv][key]:.2f} × {kv}" for kv in ("auto", "fp8") if key in base.get(kv, {})]
    tokens = f"{row['kv_tokens']:>10,} KV tokens"
    if "kv_tokens" in base.get("auto", {}):
        tokens += f" ({row['kv_tokens'] / base['auto']['kv_tokens']:.2f} × auto)"
    rest = (
        f"hit rate {row['hit_rate']:.2f}, last turn p50 {list(row['first_token'].values())[-1]['p50']:.2f} s" if "hit_rate" in row else ""
    )
    return f"{row['kv']:20s} {tokens}  {row[key]:9.2f} {key.replace('_', ' ')}  {', '.join(ratios)}  {rest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=("throughput", "replay"), default="throughput")
    parser.add_argument("--kv", nargs="+", default=list(CACHES), help=f"cache types of the engine, and {SETTING}")
    parser.add_argument("--settings", default='{"policy": "uniform", "budget_bits": 3.0}', help="kvstrata's, as JSON")
    parser.add_argument("--gib", type=float, default=12.0, help="KV cache of each rank")
    parser.add_argument("--requests", type=int, default=48, help="requests, or sessions")
    parser.add_argument("--input", type=int, default=8192)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--turns", type=int, default=None, help="of a session; default 8")
    parser.add_argument("--model", default=None, help="folder; default: random weights in the shape of Qwen3 8B")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs, for all")
    parser.add_argument("--seconds", type=float, default=280.0, help="that a process may take")
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    turns = (a.turns or 8) if a.scenario == "replay" else 1
    old = json.loads(a.out.read_text()) if a.out.exists() else []
    base: dict[str, dict[str, Any]] = {}
    for kv in a.kv:
        settings = json.loads(a.settings) if kv == SETTING else None
        load = Load(a.scenario, kv, int(a.gib * 2**30), a.requests, a.input, a.output, turns, a.model, a.tensor_parallel,
                    settings=settings, eager=a.eager)  # fmt: skip
        base[kv] = run(load, a.seconds)
        print(line(base[kv], base), flush=True)
        old.append(base[kv])
        a.out.write_text(json.dumps(old, indent=1) + "\n")
    sys.exit(any("error" in row for row in base.values()))


if __name__ == "__main__":
    main()
