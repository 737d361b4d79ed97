"""vLLM with strata against its own caches, under one KV byte budget, one process after another on one machine.

    python -m benchmarks.bench_vllm --load 48x8192/256 48x8192/1024 32x2000/300x8

Three loads for each cache: 48 requests of 8192 tokens that write 256, and 1024; 32 agents of 8 turns, each of which adds up to 2000 tokens
and writes up to 300. The model has random weights in the shape of Qwen3 8B. Rows are printed as they come and added to
benchmarks/results/vllm.json. A process that fails, or takes too long, is a row that says so.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.vllm_load import RESULT, SETTING, Load, Setup

RESULTS = Path(__file__).parent / "results" / "vllm.json"
CACHES = (SETTING, "fp8", "auto")
RATES = {"throughput": "output_tokens_a_second", "replay": "turns_a_second"}


def run(setup: Setup, seconds: float) -> Any:
    """Rows of one process as they come; the last is an error's, if it did not end well."""
    command = [sys.executable, "-m", "benchmarks.vllm_load", json.dumps(asdict(setup))]
    done, log = 0, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        for text in process.stdout:
            if text.startswith(RESULT):
                done += 1
                yield json.loads(text.removeprefix(RESULT))
            else:
                log.append(text.rstrip())
                if text.startswith(("ready", "INFO kvstrata")):
                    print(f"  {text.rstrip()}", flush=True)
        code = process.wait()
        timed_out = not timer.is_alive()
        timer.cancel()
    if done < len(setup.loads):
        why = [f"killed after {seconds:.0f} s"] if timed_out else [f"ended with {code}"]
        yield {**asdict(setup), "error": [*why, *log[-25:]]}


def name(row: dict[str, Any]) -> str:
    turns = f"x{row['turns']}" if row["scenario"] == "replay" else ""
    return f"{row['requests']}x{row['input_tokens']}/{row['output_tokens']}{turns}"


def line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A row, and its ratios to the others of the same load."""
    if "error" in row:
        return "\n    ".join([f"{row['kv']:20s} failed:", *row["error"]])
    key = RATES[row["scenario"]]
    others = [r for r in rows if "error" not in r and name(r) == name(row) and r["kv"] != row["kv"]]
    ratios = [f"{row[key] / r[key]:.2f} x {r['kv']}" for r in others]
    out = f"{row['kv']:20s} {name(row):18s} {row[key]:9.2f} {key.replace('_', ' ')}  {row['kv_tokens']:>9,} KV tokens  {', '.join(ratios)}"
    if row["scenario"] == "replay":
        turns = list(row["first_token"].values())
        out += f"\n    hit rate {row['hit_rate']:.2f}, {row['preemptions']:.0f} preemptions, first token p50 by turn (s): "
        out += " ".join(f"{t['p50']:.2f}" for t in turns) + f"; p95 of the last {turns[-1]['p95']:.2f}"
    if "books" in row:
        b = row["books"]
        out += f"\n    pages: {b['found_pages']} found, {b['demoted_pages']} demoted, {b['dropped_pages']} lost; cached {b['cached_pages']}"
    for phase, found in row.get("profile", {}).items():
        step = found["step_ms"] or 0.0
        out += f"\n    {phase}: {found['steps']} steps, {step:.2f} ms in the median; looked into: {found['looked_into_ms']:.2f}, "
        out += f"kernels {found['kernels_ms']:.2f} ms"
        out += "".join(f"\n      {ms:8.3f}  {kernel}" for kernel, ms in found["largest_ms"].items())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs="+", type=Load.parse, required=True)
    parser.add_argument("--kv", nargs="+", default=list(CACHES), help=f"cache types of the engine, and {SETTING}")
    parser.add_argument("--settings", default='{"policy": "uniform", "budget_bits": 3.0}', help="kvstrata's, as JSON")
    parser.add_argument("--gib", type=float, default=12.0, help="KV cache of each rank")
    parser.add_argument("--model", default=None, help="folder; default: random weights in the shape of Qwen3 8B")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs, for all")
    parser.add_argument("--chat", action="store_true", help="turns are user messages of the model's chat template")
    parser.add_argument("--profile", action="store_true", help="look into a few steps of the first throughput load")
    parser.add_argument("--engine", default="{}", help="further arguments of the engine, as JSON, for all")
    parser.add_argument("--seconds", type=float, default=280.0, help="that a process may take")
    parser.add_argument("--until", type=float, default=None, help="seconds from now after which none is started")
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    begin, rows = time.monotonic(), []
    old = json.loads(a.out.read_text()) if a.out.exists() else []
    for kv in a.kv:
        left = a.seconds if a.until is None else min(a.seconds, a.until - (time.monotonic() - begin))
        if left < 30:
            print(f"{kv}: not started, {left:.0f} s are left", flush=True)
            continue
        settings = json.loads(a.settings) if kv == SETTING else None
        setup = Setup(kv, int(a.gib * 2**30), tuple(asdict(load) for load in a.load), a.model, a.tensor_parallel, settings=settings,
                      eager=a.eager, profile=a.profile, chat=a.chat, engine=json.loads(a.engine))  # fmt: skip
        for row in run(setup, left):
            rows.append(row)
            print(line(row, rows), flush=True)
            a.out.parent.mkdir(parents=True, exist_ok=True)
            a.out.write_text(json.dumps(old + rows, indent=1) + "\n")
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
