"""A prompt's attention in 8 bits with lines and a window whole: time against bf16 SDPA, and error against uniform quantization.

    python -m benchmarks.bench_prefill [--activations FILE ... [--lengths 16384,32768] [--no-times]] [--tokens 8192,131072]

Times, launched as a CUDA graph (`us`) and one by one (`eager_us`): the geometry of Qwen3-8B, 5% lines, random numbers; "pack" is the pass
that quantizes, part of both; how lines are chosen is not.
Errors: FILEs are what `python -m kvstrata.eval.activations` wrote of a real model. Uniform quantization is the same operator without lines
or window, after SageAttention: codes of Q and K with a scale a row and a tile, K's mean taken off, P·V in fp8.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend

from benchmarks.common import RESULTS, check, microseconds, relative_error, save, softmax_scale
from kvstrata.eval.activations import read
from kvstrata.ops import prefill_cuda
from kvstrata.ops.prefill import Precision, prefill, prefill_ref
from kvstrata.ops.prefill_kernel import prefill_triton
from kvstrata.ops.score import NUM_QUERIES, column_scores

HEADS, HEAD_DIM, GROUP, WINDOW, RHO = 8, 128, 4, 128, 0.05
TOKENS = (8192, 32768, 65536, 131072)
SCORES = ("int8", "fp8")
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention in float64, 512 queries at a time. q [T, Hq, D], k, v [T, H, D]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for i in range(0, len(q), 512):
        end = min(i + 512, len(q))
        x = q[i:end].double().transpose(0, 1) @ keys[:, :end].transpose(1, 2) * scale
        x.masked_fill_(torch.arange(end, device=q.device) > torch.arange(i, end, device=q.device)[:, None], -torch.inf)
        out[i:end] = (torch.softmax(x, -1) @ values[:, :end]).transpose(0, 1)
    return out


def random_inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gen = torch.Generator("cuda").manual_seed(tokens)
    shape = {"device": "cuda", "dtype": torch.bfloat16, "generator": gen}
    q, k, v = (torch.randn(tokens, n, HEAD_DIM, **shape) for n in (HEADS * GROUP, HEADS, HEADS))
    picked = [torch.randperm(tokens, device="cuda", generator=gen)[: int(RHO * tokens)].sort().values for _ in range(HEADS)]
    return q, k, v, torch.stack(picked).int()


def check_all() -> None:
    """Both formats against the reference and float64, before anything is timed."""
    q, k, v, lines = random_inputs(2113)
    scale = softmax_scale(HEAD_DIM)
    x = exact(q, k, v, scale)
    for scores in SCORES:
        out, ref = (f(q, k, v, lines, scale, window=WINDOW, precision=Precision(scores)) for f in (prefill, prefill_ref))
        check(f"prefill {scores} against the reference", relative_error(out, ref), 1.2e-2)
        check(f"prefill {scores} against float64", relative_error(out, x), 5e-2)


def times(tokens: int) -> Iterator[dict[str, object]]:
    q, k, v, lines = random_inputs(tokens)
    scale = softmax_scale(HEAD_DIM)
    bf16 = {}
    dense = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    for name, kind in BACKENDS.items():
        with sdpa_kernel(kind):
            bf16[name] = microseconds(partial(attend, *dense, is_causal=True, scale=scale, enable_gqa=True))
    best = min(bf16.values())
    print(f"{tokens}: " + ", ".join(f"{n} {t / 1e3:.2f} ms" for n, t in bf16.items()), flush=True)
    for scores in SCORES:
        how = {"window": WINDOW, "scores": scores}
        us = microseconds(partial(prefill_cuda.prefill_cuda, q, k, v, lines, scale, **how))
        eager = microseconds(partial(prefill_cuda.prefill_cuda, q, k, v, lines, scale, **how), graph=False)
        packed = prefill_cuda.pack(k, v, lines, smooth=True, **how)
        attend_us = microseconds(partial(prefill_cuda.attend, q, k, v, packed, scale, **how))
        flops = 2 * HEADS * GROUP * HEAD_DIM * tokens * (tokens + 1)
        row = {
            "tokens": tokens,
            "scores": scores,
            "us": us,
            "eager_us": eager,
            "attend_us": attend_us,
            "tflops": flops / us / 1e6,
            "over_bf16": us / best,
        }
        row |= {"attend_over_bf16": attend_us / best} | {f"{n}_us": t for n, t in bf16.items()}
        if tokens == TOKENS[0]:
            run = partial(prefill_triton, q, k, v, lines, scale, window=WINDOW, precision=Precision(scores))
            row["triton_us"] = microseconds(run, graph=False)
        yield row
        ratios = f"{us / best:.3f} of bf16, launched one by one {eager / best:.3f} ({attend_us / best:.3f} without the pass)"
        print(f"  {scores}: {us / 1e3:.3f} ms, {row['tflops']:.0f} TFLOP/s, {ratios}", flush=True)


def errors(path: str, lengths: list[int]) -> list[dict[str, object]]:
    """Mean squared error over the output's mean square, of all queries and of those of the second half, over the first tokens of the
    context, as many as `lengths` say, or all where it is empty."""
    layers, made = read(path)
    rows = []
    for layer, tokens in itertools.product(layers, lengths or [made["tokens"]]):
        q, k, v = (layers[layer][name][:tokens].cuda() for name in "qkv")
        scale, half = softmax_scale(q.shape[2]), len(q) // 2
        x = exact(q, k, v, scale)
        mass = column_scores(q[-NUM_QUERIES:], k, scale)[:, : len(k) - WINDOW]
        lines = mass.topk(int(RHO * len(k)), dim=1).indices.sort(dim=1).values.int()
        for scores in SCORES:
            precision = Precision(scores)
            outs = {
                "uniform": prefill_ref(q, k, v, lines[:, :0], scale, window=0, precision=precision),
                "window": prefill(q, k, v, lines[:, :0], scale, window=WINDOW, precision=precision),
                "lines": prefill(q, k, v, lines, scale, window=0, precision=precision),
                "both": prefill(q, k, v, lines, scale, window=WINDOW, precision=precision),
            }
            row: dict[str, object] = {"activations": made, "layer": layer, "tokens": len(q), "scores": scores}
            for name, out in outs.items():
                row[name] = relative_error(out, x) ** 2
                row[f"{name}_late"] = relative_error(out[half:], x[half:]) ** 2
            rows.append(row)
            late = f"second half {row['uniform_late']:.1e} and {row['both_late']:.1e}"
            print(f"  layer {layer} of {len(q)}, {scores}: uniform {row['uniform']:.1e}, ours {row['both']:.1e}, {late}", flush=True)
    return rows


def add(name: str, rows: list[dict[str, object]]) -> None:
    """Save rows beside those that other runs have found, on the same kind of GPU, of other contexts, layers and lengths."""

    def key(row: dict[str, object]) -> str:
        return json.dumps([row.get(x) for x in ("activations", "layer", "tokens", "scores")], sort_keys=True)

    path = RESULTS / f"{name}.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {key(row) for row in rows}
    save(name, sorted([row for row in old if key(row) not in new] + rows, key=lambda row: row["tokens"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--activations", nargs="*", default=[], help="files that kvstrata.eval.activations wrote")
    parser.add_argument(
        "--lengths", default="", help="lengths of context to look at of each file, with commas between; all of it by default"
    )
    parser.add_argument("--times", action=argparse.BooleanOptionalAction, default=True, help="whether anything is timed")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="lengths of prompts that are timed")
    options, _ = parser.parse_known_args()
    lengths = [int(x) for x in options.lengths.split(",") if x]
    check_all()
    if options.activations:
        add("prefill_error", [row for path in options.activations for row in errors(path, lengths)])
    if not options.times:
        return
    for tokens in map(int, options.tokens.split(",")):
        for row in times(tokens):
            add("prefill", [row])


if __name__ == "__main__":
    main()
