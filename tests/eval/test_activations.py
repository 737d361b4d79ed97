"""Activations of a model as a file: what attention sees, of one KV head, and the model as it was."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvstrata.eval import activations
from kvstrata.eval.traces import TraceSet
from tests.models import tiny

IDS = list(range(3, 40))


@pytest.mark.parametrize("chunk", [8, 37, 64])
def test_a_kv_head_and_its_first_query_heads_give_that_heads_attention(chunk: int) -> None:
    model = tiny("qwen2")
    seen: list[torch.Tensor] = []
    hook = model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, out: seen.append(args[0][0]))
    parts = activations.activations(model, IDS, [1], 1, 1, chunk)
    hook.remove()
    assert set(parts) == {1} and len(model.model.layers) == 3
    q, k, v = (parts[1][name] for name in "qkv")
    assert q.shape == k.shape == v.shape == (len(IDS), 1, 64) and q.dtype is torch.bfloat16
    scores = (q[:, 0].float() @ k[:, 0].float().T / 8).masked_fill(torch.ones(len(IDS), len(IDS)).triu(1).bool(), -torch.inf)
    # the second KV head serves query heads 2 and 3
    expected = torch.cat(seen).view(len(IDS), 4, 64)[:, 2]
    assert (torch.softmax(scores, -1) @ v[:, 0].float() - expected).norm() < 2e-2 * expected.norm()


def test_a_file_is_read_as_it_was_made(tmp_path: Path) -> None:
    x = {name: torch.randn(4, 1, 8).to(torch.bfloat16) for name in ("11.q", "2.q", "2.k")}
    save_file(x, tmp_path / "a", {"made": json.dumps({"model": "tiny"})})
    layers, made = activations.read(tmp_path / "a")
    assert made == {"model": "tiny"} and list(layers) == [2, 11]
    assert torch.equal(layers[2]["k"], x["2.k"]) and torch.equal(layers[11]["q"], x["11.q"])


def test_a_source_that_is_too_short_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "load_traces", lambda source: TraceSet(source, ("a", "b")))
    monkeypatch.setattr(activations, "render", lambda tokenizer, trace: type("C", (), {"token_ids": IDS}))
    assert activations.context(None, "any", 50) == IDS + IDS[:13]
    with pytest.raises(ValueError, match="'any' hold 74 tokens, 75 are asked for"):
        activations.context(None, "any", 75)
