"""Draws benchmarks/results/decode.json: time over the best bf16 kernel, by shape and setting."""

import json

import matplotlib.pyplot as plt

from benchmarks.common import RESULTS


def main() -> None:
    data = json.loads((RESULTS / "decode.json").read_text())
    rows = data["rows"]
    shapes = list(dict.fromkeys((r["batch"], r["tokens"], r["group"]) for r in rows))
    settings = list(dict.fromkeys(r["setting"] for r in rows))
    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    ratio = {(r["batch"], r["tokens"], r["group"], r["setting"]): r["over_bf16"] for r in rows}
    width = 0.8 / len(settings)
    for i, setting in enumerate(settings):
        values = [ratio[(*shape, setting)] for shape in shapes]
        axes.bar([x + i * width for x in range(len(shapes))], values, width, label=setting)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(shapes))], [f"{b} x {t}\ngroup {g}" for b, t, g in shapes], fontsize=8)
    axes.set_ylabel("time over the best bf16 kernel")
    axes.set_title(f"Decode on {data['environment']['gpu']}, 8 KV heads, head_dim 128")
    axes.legend(fontsize=8)
    figure.savefig(RESULTS / "decode.png", dpi=120)


if __name__ == "__main__":
    main()
