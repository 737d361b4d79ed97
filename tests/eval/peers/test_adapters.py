"""Each peer on a tiny model: what it holds, counted by hand; what it gives back; that the model is left as it was.

Peers whose packages are heavy, or pin other releases of transformers, run under `pytest -m peers` (docs/peers.md: how to install them).
"""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstrata.eval.peers import need
from kvstrata.eval.peers.caches import Quantized, TinyTurboQuant, TurboQuantPro
from kvstrata.eval.peers.formats import Format
from kvstrata.eval.peers.presses import Press
from kvstrata.eval.peers.session import PeerSession, dense_prefill
from tests.models import VOCAB, tiny

HEADS, DIM, PREFIX, TOKENS = 2, 64, 500, 620
needs_packages = pytest.mark.peers

# peer, bits of a stored token's K and V element with metadata, tokens that stay dense of PREFIX
STORING = [
    (Format("fp8"), 8.0, 0),
    (Format("bf16"), 16.0, 0),
    (Format("nvfp4"), 4.5, 0),
    # a scale and a least number of 16 bits for 64 channels
    (Format("int4"), 4.5, 0),
    (Format("int8"), 8.5, 0),
    # groups of 64 with two numbers of 16 bits; what is no multiple of 64 stays
    (Quantized("hqq", 4, 0, 1), 4.5, PREFIX % 64),
    (Quantized("hqq", 2, 1, 1, 32, 64, flat=True), 2.5, 32 + 64 + (PREFIX - 96) % 64),
    # ten codes of three bits in four bytes: 768 groups, a row each, in 77 rows of words
    (Quantized("hqq", 3, 1, 1, 32, 64, flat=True), 32 * 77 / 768 + 0.5, 32 + 64 + (PREFIX - 96) % 64),
    # K by channel over 32 tokens, V by token; two numbers of 16 bits each
    (TinyTurboQuant(4, 2, residual=128, block=32), (4 + 1 + 2 + 0.5) / 2, 128 + (PREFIX - 128) % 32),
    (TinyTurboQuant(3, 3, residual=64, block=32, sinks=32), (3 + 1 + 3 + 0.5) / 2, 96 + (PREFIX - 96) % 32),
    # K: two float32 of a channel, no outliers; V: one float32 of a token
    (TurboQuantPro(2, 128, 0.0), (4 + 64 / (PREFIX - 128) + 2 + 0.5) / 2, 128),
    (TurboQuantPro(3, 64, 0.0, sinks=32), (4 + 64 / (PREFIX - 96) + 3 + 0.5) / 2, 96),
    pytest.param(Quantized("quanto", 4, -1, 0), 4.5, PREFIX % 64, marks=needs_packages),
    pytest.param(Quantized("quanto", 2, -1, 0, 32, 64), 2.5, 32 + 64 + (PREFIX - 96) % 64, marks=needs_packages),
]
PRESSES = ["SnapKVPress", "ExpectedAttentionPress", "KeyDiffPress", "TOVAPress"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("qwen2")


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(3, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def original(model: Any, ids: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Keys and values of the prefix, and logits of the rest."""
    with torch.no_grad():
        keys, values, _ = dense_prefill(model, torch.tensor([ids[:PREFIX]]), 1)
        return keys, values, model(torch.tensor([ids])).logits[0, PREFIX:].float()


def divergence(reference: Tensor, ours: Tensor) -> float:
    p, q = reference.double().log_softmax(-1), ours.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("peer, bits, dense", STORING, ids=str)
def test_a_peer_holds_what_its_layout_says_and_gives_tokens_back(
    peer: Any, bits: float, dense: int, model: Any, ids: list[int], original: Any
) -> None:
    keys, values, logits = original
    with PeerSession(model, peer, "oneshot") as session:
        session.feed(ids[:PREFIX], (), logits_to_keep=1)
        wanted = (16 * dense + bits * (PREFIX - dense)) / PREFIX
        assert session.report.bits_per_element == pytest.approx(wanted, rel=1e-3)
        continuation: Any = session.cache
        read = [(layer.keys, layer.values) for layer in continuation._continuation.layers]
        ours = session.feed(ids, (), logits_to_keep=TOKENS - PREFIX)
    start, end = getattr(peer, "sinks", 0), PREFIX - dense + getattr(peer, "sinks", 0)
    coarse = 0.3 if min(getattr(peer, "bits", 4), getattr(peer, "key_bits", 4), getattr(peer, "value_bits", 4)) == 2 else 0.05
    for pair, exact in zip(read, zip(keys, values, strict=True), strict=True):
        for x, y in zip(pair, exact, strict=True):
            assert torch.equal(x[:, :, :start], y[:, :, :start])
            assert torch.equal(x[:, :, end:], y[:, :, end:])
            error = (x - y)[:, :, start:end].square().mean() / y[:, :, start:end].var()
            # coarser, and no more than a grid of so many steps is
            assert 1e-7 < error < coarse
    assert 0 < divergence(logits, ours) < 0.01


@pytest.mark.parametrize("peer", [Quantized("hqq", 4, 0, 1), TurboQuantPro(4, 128)], ids=str)
def test_a_cache_class_runs_turns_by_itself(peer: Any, model: Any, ids: list[int], original: Any) -> None:
    with PeerSession(model, peer, "turns") as session:
        for end in (PREFIX, PREFIX + 20, PREFIX + 21):
            session.feed(ids[:end], (), logits_to_keep=1)
        ours = session.feed(ids, (), logits_to_keep=TOKENS - PREFIX - 21)
        assert [r.new_tokens for r in session.reports] == [PREFIX, 20, 1, TOKENS - PREFIX - 21]
        assert session.cache.stored_tokens == TOKENS
    assert 0 < divergence(original[2][21:], ours) < 0.01


@needs_packages
@pytest.mark.parametrize("press", PRESSES)
def test_a_press_keeps_tokens_as_they_are_and_leaves_the_model_alone(press: str, model: Any, ids: list[int], original: Any) -> None:
    keys, _, logits = original
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    with PeerSession(model, Press(press, 0.25), "oneshot") as session:
        session.feed(ids[:PREFIX], (), logits_to_keep=1)
        assert session.report.bits_per_element == pytest.approx(4.0)
        cache: Any = session.cache
        for layer, exact in zip(cache.cache.layers, keys, strict=True):
            assert layer.keys.shape[2] == PREFIX // 4
            for head in range(HEADS):
                # every key that is kept is one of the prefix's
                assert (layer.keys[0, head][:, None] - exact[0, head]).abs().amax(-1).amin(1).max() < 1e-6
        ours = session.feed(ids, (), logits_to_keep=TOKENS - PREFIX)
    assert divergence(logits, ours) > 1e-6
    with PeerSession(model, Press(press, 1.0), "oneshot") as session:
        session.feed(ids[:PREFIX], (), logits_to_keep=1)
        # positions are those of the conversation, not of what is kept
        assert torch.allclose(session.feed(ids, (), logits_to_keep=TOKENS - PREFIX), logits, atol=1e-4)
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before
    assert all(not hasattr(layer.self_attn, "rotary_emb") and not layer.self_attn._forward_hooks for layer in model.model.layers)


@needs_packages
def test_masked_tokens_are_held_and_counted(model: Any, ids: list[int], original: Any) -> None:
    peer = Press("ExpectedAttentionPress", 0.25, adaptive=True)
    with PeerSession(model, peer, "oneshot") as session:
        session.feed(ids[:PREFIX], (), logits_to_keep=1)
        assert session.report.bits_per_element == 16.0
        ours = session.feed(ids, (), logits_to_keep=TOKENS - PREFIX)
    assert peer.masked == 0.75
    assert divergence(original[2], ours) > 1e-6
    # nothing of it stays behind
    with torch.no_grad():
        assert torch.allclose(model(torch.tensor([ids])).logits[0, PREFIX:].float(), original[2], atol=1e-5)


def test_what_is_misused_is_named(model: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="does not run protocol 'turns'; accepted: oneshot"):
        PeerSession(model, Format("fp8"), "turns")
    with pytest.raises(ValueError, match="unknown format 'fp3'; accepted: nvfp4, fp8, int4, int8, bf16"):
        Format("fp3")
    session = PeerSession(model, Format("fp8"), "oneshot")
    session.feed(ids[:9], (), logits_to_keep=1)
    with pytest.raises(ValueError, match="do not continue the 9 that were fed"):
        session.feed(ids[1:20], (), logits_to_keep=1)

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    for peer in (Quantized("quanto", 4, -1, 0), Press("SnapKVPress", 0.5), TurboQuantPro(4), TinyTurboQuant(4, 2)):
        with pytest.raises(need.MissingPeerError, match=r"(optimum-quanto|kvpress|turboquant-pro|tiny-turboquant)==[\d.]+ is needed"):
            PeerSession(model, peer, "oneshot")
