"""Writes the tables of docs/kernels.md, between its markers, from benchmarks/results/*.json."""

import json
from pathlib import Path

from benchmarks.common import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
BEGIN, END = "<!-- results: written by python -m benchmarks.report -->", "<!-- end of results -->"


def table(columns: list[str], rows: list[list[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(str(c) for c in row) + " |" for row in rows])


def load(name: str) -> dict[str, list[dict[str, float]]]:
    path = RESULTS / f"{name}.json"
    result: dict[str, list[dict[str, float]]] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return result


def prefill() -> list[str]:
    """Times of a prompt in 8 bits, and its errors on real activations: squared, over the output's mean square."""
    parts = []
    if rows := load("prefill")["rows"]:
        columns = [
            "prompt in 8 bits",
            "Q·K",
            "ms",
            "TFLOP/s",
            "over bf16, as a graph",
            "launched one by one",
            "without the pass",
            "SDPA cuDNN, flash: ms",
        ]
        cells = [
            [r["tokens"], r["scores"], f"{r['us'] / 1e3:.2f}", f"{r['tflops']:.0f}", f"{r['over_bf16']:.3f}",
             f"{r['eager_us'] / r['us'] * r['over_bf16']:.3f}" if "eager_us" in r else "", f"{r['attend_over_bf16']:.3f}",
             f"{r['cudnn_us'] / 1e3:.2f}, {r['flash_us'] / 1e3:.2f}"]
            for r in rows
        ]  # fmt: skip
        parts.append(table(columns, cells))
    if rows := load("prefill_error")["rows"]:
        columns = ["activations", "layer", "Q·K", "uniform", "window alone", "lines alone", "both", "uniform over both", "second half"]
        cells = [
            [f"{dict(r['activations'])['model']}, {r['tokens']} tokens", r["layer"], r["scores"],
             *(f"{r[n]:.1e}" for n in ("uniform", "window", "lines", "both")),
             f"{r['uniform'] / r['both']:.1f}", f"{r['uniform_late'] / r['both_late']:.1f}"]
            for r in rows
        ]  # fmt: skip
        parts.append(table(columns, cells))
    return parts


def anchors() -> list[str]:
    """Decode over anchors: a line for each shape."""
    rows = [r for r in load("hyquant_decode")["rows"] if "batch" in r]
    if not rows:
        return []
    kinds = list(dict.fromkeys((r["tier"], r["anchors"]) for r in rows))
    shapes = list(dict.fromkeys((r["tokens"], r["batch"]) for r in rows))
    columns = ["tokens × sequences", "bf16: ms in 36 layers", "tokens/s"]
    columns += [f"{tier}, anchors {anchor}: ms (over bf16), tokens/s" for tier, anchor in kinds]
    cells = []
    for tokens, batch in shapes:
        own = [r for r in rows if (r["tokens"], r["batch"]) == (tokens, batch)]
        cells.append([f"{tokens} × {batch}", f"{36 * own[0]['bf16_us'] / 1e3:.2f}", f"{own[0]['bf16_tokens_a_second']:.0f}"]
                     + [f"{r['ms_36_layers']:.2f} ({r['over_bf16']:.2f}), {r['tokens_a_second']:.0f}" for r in own])  # fmt: skip
    return [table(columns, cells)]


def main() -> None:
    parts = []
    data = load("decode")
    if data["rows"]:
        where = ", ".join(f"{k} {v}" for k, v in dict(data["environment"]).items() if v)
        parts.append(f"{where}. 8 KV heads, head_dim 128. Decode by the {data['rows'][0].get('kernel', 'triton')} kernel.")
        rows = [
            [f"{r['batch']} × {r['tokens']}", r["group"], r["setting"], f"{r['us']:.1f}", f"{r['bytes'] / 1e6:.0f}",
             f"{r['percent_of_floor']:.0f}%", f"{r['over_bf16']:.3f}", f"{r['fa3_fp8_us'] / r['us']:.2f} ×" if "fa3_fp8_us" in r else ""]
            for r in data["rows"]
        ]  # fmt: skip
        parts.append(table(["sequences × tokens", "group", "pages", "µs", "MB", "of floor", "over bf16", "speed over FA3 fp8"], rows))
    data = load("write")
    if data["rows"]:
        rows = [[r["op"], f"{r['us']:.0f}", f"{r['percent_of_copy']:.0f}%"] for r in data["rows"]]
        parts.append(table(["write", "µs", "of copy bandwidth"], rows))
    data = load("extend")
    if data["rows"]:
        rows = [
            [f"{r['prefix']} + {r['chunk']}", r["tier"], f"{r['us']:.0f}", f"{r['tflops']:.0f}", f"{r.get('speed_over_flash', 0):.2f}"]
            for r in data["rows"]
        ]
        parts.append(table(["prefix + chunk", "tier", "µs", "TFLOP/s", "speed over flash in bf16"], rows))
    parts += prefill() + anchors()
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}" + rest.split(END)[1])


if __name__ == "__main__":
    main()
