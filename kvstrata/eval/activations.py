"""Real queries, keys and values of a model over a long context, as a file that a machine without the model can read.

    python -m kvstrata.eval.activations --out qwen15-8k.safetensors --model qwen15 --tokens 8192 --layers 1,8,15,22

The context is conversations of a source one after another, cut at `tokens`. Of each layer one KV head is kept, and the first query heads
of its group. The model reads it CHUNK tokens at a time, so that its memory grows with keys and values alone. Knows nothing of what is done
with them.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from kvstrata.adapters.capture import captured
from kvstrata.eval.conversation import render
from kvstrata.eval.models import load
from kvstrata.eval.traces import load_traces

CHUNK = 2048
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What the model computes in; a file holds bfloat16 either way."""


def context(tokenizer: Any, source: str, tokens: int) -> list[int]:
    """The first `tokens` token ids of a source's conversations, one after another. Raises ValueError where there are fewer."""
    ids: list[int] = []
    for trace in load_traces(source).traces:
        ids += list(render(tokenizer, trace).token_ids)
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ValueError(f"traces {source!r} hold {len(ids)} tokens, {tokens} are asked for")


@torch.inference_mode()
def activations(
    model: Any, ids: list[int], layers: list[int], kv_head: int, query_heads: int, chunk: int = CHUNK
) -> dict[int, dict[str, Tensor]]:
    """By layer: q [T, query_heads, D], k and v [T, 1, D], bfloat16, of one KV head. Layers behind the last one asked for do not run."""
    queries: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    stored: dict[int, tuple[Tensor, Tensor]] = {}

    def heads_inside(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).transpose(0, 1).contiguous()

    def see(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        if layer in queries:
            group = q.shape[0] // k.shape[0]
            queries[layer].append(heads_inside(q[kv_head * group : kv_head * group + min(query_heads, group)]))
            # of all tokens so far
            stored[layer] = k[kv_head : kv_head + 1], v[kv_head : kv_head + 1]

    body, cache = model.model, DynamicCache()
    kept, body.layers = body.layers, body.layers[: max(layers) + 1]
    try:
        with captured(model, see):
            for i in range(0, len(ids), chunk):
                body(torch.tensor([ids[i : i + chunk]]), past_key_values=cache, use_cache=True)
    finally:
        body.layers = kept
    return {x: {"q": torch.cat(queries[x]), "k": heads_inside(stored[x][0]), "v": heads_inside(stored[x][1])} for x in layers}


def read(path: Path | str) -> tuple[dict[int, dict[str, Tensor]], dict[str, Any]]:
    """What main() wrote: tensors by layer, and how they were made."""
    out: dict[int, dict[str, Tensor]] = {}
    for key, x in load_file(path).items():
        layer, name = key.split(".")
        out.setdefault(int(layer), {})[name] = x
    with safe_open(path, "pt") as file:
        return dict(sorted(out.items())), json.loads(file.metadata()["made"])


def main(
    out: Annotated[Path, typer.Option()], model: str = "qwen15", traces: str = "bfcl:multi_turn_base", tokens: int = 8192,
    layers: str = "1,8,15,22", kv_head: int = 0, query_heads: int = 2, dtype: str = "float32",
) -> None:  # fmt: skip
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; accepted: {', '.join(DTYPES)}")
    loaded, tokenizer = load(model, DTYPES[dtype])
    wanted = [int(x) for x in layers.split(",")]
    count = loaded.config.num_hidden_layers
    if not wanted or min(wanted) < 0 or max(wanted) >= count:
        raise ValueError(f"layers are {layers!r}; accepted: numbers from 0 to {count - 1} with commas between")
    found = activations(loaded, context(tokenizer, traces, tokens), wanted, kv_head, query_heads)
    tensors = {f"{layer}.{name}": x for layer, parts in found.items() for name, x in parts.items()}
    made = {"model": model, "traces": traces, "tokens": tokens, "kv_head": kv_head, "query_heads": query_heads, "dtype": dtype}
    save_file(tensors, str(out), {"made": json.dumps(made)})
    typer.echo(f"{out}: {', '.join(f'{k} {list(x.shape)}' for k, x in tensors.items())}")


if __name__ == "__main__":
    typer.run(main)
