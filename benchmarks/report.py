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
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}" + rest.split(END)[1])


if __name__ == "__main__":
    main()
