"""Sessions as files: a loaded conversation goes on as if it had never left, and a file that is not whole is not loaded."""

import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from kvstrata.adapters.hf import store_config
from kvstrata.ops.dense import from_frames
from kvstrata.ops.residual import HeadConfig, ResidualHead
from kvstrata.session import Session
from kvstrata.store import verified
from kvstrata.store.arena import OutOfFramesError
from kvstrata.store.page import Sequence
from kvstrata.store.plain import parsed, plain
from kvstrata.store.prefix import page_key
from kvstrata.store.saved import Facts
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Anchors, Ask, Plan, Role, Span, Thinning, Tier, Weighing
from tests.models import tiny
from tests.test_session import conversation

VOCAB = 1024
CODECS, DTYPES = ("planes", "kivi"), ("bfloat16", "float32")
CASES: dict[str, dict[str, Any]] = {
    "uniform": {"budget_bits": 3.4},
    "triaxial": {"budget_bits": 3.0},
    "hyquant": {"policy_settings": {"tier": "INT2", "rho": 0.1, "anchor_tier": "INT8"}},
    "intentkv": {"policy_settings": {"kept": 300, "tier": "INT4"}, "chunk_tokens": 200},
    "h2o": {"policy_settings": {"kept": 300}, "chunk_tokens": 200},
    "snapkv": {"policy_settings": {"kept": 300}},
    "strata": {"budget_bits": 0.9},
    "strata, anchors": {"budget_bits": 3.0, "policy_settings": {"rho": (0.0, 0.02, 0.1)}},
    "full": {},
    "role": {"codec": "kivi"},
    "window": {"policy_settings": {"recent": 200, "tier": "INT4"}},
}


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path("qwen05"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("qwen2", vocab_size=VOCAB)


def told(tokens: int) -> tuple[list[int], tuple[Span, ...]]:
    """A schema, then turns of a request, a call and an observation."""
    ids = torch.randint(10, 1000, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    spans, turn = [Span(0, 100, Role.INST, 0)], 0
    while spans[-1].end < tokens:
        turn += 1
        for role, length in ((Role.USER, 20), (Role.TOOL_CALL, 20), (Role.OBS, 160)):
            start = spans[-1].end
            if start < tokens:
                spans.append(Span(start, min(start + length, tokens), role, turn))
    return ids, tuple(spans)


IDS, SPANS = told(1600)


def feed(session: Session, end: int, token: int | None = None) -> torch.Tensor:
    """Logits of a turn that ends at token `end`; token: that the last one is instead."""
    ids = IDS[:end] if token is None else [*IDS[: end - 1], token]
    out = session.feed(ids, tuple(Span(s.start, min(s.end, end), s.role, s.turn) for s in SPANS if s.start < end))
    session.store.check_integrity()
    return out


def begun(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: str, **more: Any) -> Session:
    """A session in mid-conversation: two turns, then tokens one by one to where no page ends."""
    settings = {} if "store" in more else {"capacity_tokens": 2400}
    session = Session(model, tokenizer, policy.partition(",")[0], **CASES[policy] | settings | more)
    for end in (500, 900, *range(901, 909)):
        feed(session, end)
    return session


def state(session: Session) -> dict[str, Any]:
    """All that a sequence is, but for which frames it has."""
    s, q = session._sequence, session.store.queries
    layers, first = range(session.layout.num_layers), max(s.queries_from, s.num_tokens - 64)
    buffer = session.store.arena.buffer
    gathered = [(p.tier, p.positions.tobytes(), p.whole.tobytes()) for p in (*s.anchors, *s.survivors)]
    planes = [_bytes(buffer[:, list(p.frames)]) for p in (*s.pages, *s.anchors, *s.survivors) if p.tier is not Tier.BF16]
    return {
        "ids": s.token_ids, "pages": [(p.tier, p.live) for p in s.pages], "gathered": gathered, "planes": planes, "plan": s.plan,
        "keys": _keys(s), "salted": bool(s.salt), "settled": s.settled, "weights": s.weights.tolist(), "at": (s.chosen_at, s.weighed_at),
        "memory": (s.memory.positions, s.memory.turns, s.memory.until), "queries_from": s.queries_from, "thinned": s.thinned,
        "remembered": _bytes(s.memory.queries),
        "newest": [_bytes(q.read(i, s.ring, first, s.num_tokens)) for i in layers] if q.holds(s.ring) and first < s.num_tokens else None,
        "watched": [_bytes(x) for x in (s.received, s.worth)], "told_by": s.told_by, "scale": s.scale,
        "spans": session.spans, "bytes": session.bytes_in_use, "reports": len(session.reports), "peak": (s.peak_frames, s.peak_tokens),
    }  # fmt: skip


def _bytes(x: torch.Tensor | None) -> bytes | None:
    return None if x is None else x.contiguous().view(torch.uint8).numpy().tobytes()


def _keys(s: Sequence) -> tuple[list[bytes], int]:
    """Those that another store would give too, and how many there are: a salt is of one store."""
    known: list[bytes] = []
    for p, key in enumerate(s.keys):
        ids = s.token_ids[p * PAGE_SIZE : (p + 1) * PAGE_SIZE]
        if key not in [page_key(known[-1] if known else b"", ids, f"{c}/{d}/{w}") for c in CODECS for d in DTYPES for w in (0, 64, 128)]:
            break
        known.append(key)
    return known, len(s.keys)


def go_on(session: Session) -> list[torch.Tensor]:
    """Logits of a reply token by token, over several pages, a long turn, a rewritten history and what follows it."""
    out = [feed(session, end) for end in (*range(909, 979), 1300)]
    return [*out, feed(session, 1150, token=7), *(feed(session, end) for end in (1180, 1181, 1500))]


def check_same(a: Session, b: Session) -> None:
    """One goes on, then the other, with logits that are equal in every bit."""
    assert state(a) == state(b)
    for x, y in zip(go_on(a), go_on(b), strict=True):
        assert torch.equal(x, y)
    assert state(a) == state(b)


@pytest.mark.parametrize("policy", CASES)
def test_a_loaded_session_goes_on_bit_by_bit(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, policy: str
) -> None:
    session = begun(model, tokenizer, policy)
    s = session._sequence
    # what the case is there for is there
    assert bool(s.anchors) == (policy in ("hyquant", "strata, anchors"))
    assert bool(s.survivors) == (policy in ("intentkv", "h2o", "snapkv", "strata"))
    assert bool(len(s.weights)) == policy.startswith("strata")
    assert bool(s.memory.positions) == (policy == "intentkv")
    assert (s.received is not None) == (policy == "h2o")
    assert session.store.queries.holds(s.ring) == (policy in ("hyquant", "intentkv", "snapkv", "strata", "strata, anchors"))
    assert bool(s.salt) == (policy in ("intentkv", "h2o", "snapkv", "window", "strata"))
    session.save(tmp_path / "one.kvs")
    with Session.load(tmp_path / "one.kvs", model, tokenizer) as loaded:
        loaded.store.check_integrity()
        assert loaded._sequence.keys == session._sequence.keys
        assert loaded.report == session.report
        check_same(session, loaded)
    assert [p.name for p in tmp_path.iterdir()] == ["one.kvs"]


@pytest.mark.parametrize("policy", ["uniform", "hyquant", "intentkv", "strata", "strata, anchors"])
def test_a_shared_store_takes_forks_and_loads(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, policy: str
) -> None:
    """The saved session shares its frames with a fork and a neighbour; it is loaded beside them, and again where others lie."""
    window = 128 if policy == "hyquant" else 0 if policy.startswith("strata") else 64
    store = Store(store_config(model, 12000, window=window))
    session = begun(model, tokenizer, policy, store=store)
    fork = store.fork(session._sequence.id)
    neighbour = begun(model, tokenizer, policy, store=store)
    session.save(tmp_path / "one.kvs")
    loaded = [Session.load(tmp_path / "one.kvs", model, tokenizer, store=store) for _ in range(2)]
    store.check_integrity()
    salts = [x._sequence.salt for x in (session, *loaded)]
    assert len(set(salts)) == 3 if salts[0] else set(salts) == {b""}
    feed(loaded[1], 1000)
    assert not {i for f in loaded[0]._sequence.held for i in f} & {i for f in session._sequence.held for i in f}
    check_same(session, loaded[0])
    store.release(fork)
    for other in (session, neighbour, *loaded):
        other.reset()
    store.check_integrity()
    assert store.frames_in_use == 0


def test_every_field_of_a_sequence_is_accounted_for() -> None:
    """A new one has to be saved, and compared in `state`, or named here with those that belong to one store."""
    saved = {f.name for f in fields(Facts)} | {"token_ids", "weights", "received", "worth"}
    otherwise = {"id", "version", "salt", "ring", "memory"}
    assert {f.name for f in fields(Sequence)} == (saved | otherwise) & {f.name for f in fields(Sequence)}
    assert saved - {f.name for f in fields(Sequence)} == {"salted", "has_ring", "memory_positions", "memory_turns", "memory_until"}


@pytest.mark.parametrize("rho", [0.0, 0.1])
def test_a_chat_goes_on(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, rho: float) -> None:
    model = tiny("qwen2", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    messages = conversation(1)
    with Session(model, tokenizer, "strata", 3.0, policy_settings={"rho": rho}, capacity_tokens=1500) as session:
        reply = session.chat(messages, max_new_tokens=40, min_new_tokens=40)
        messages += [reply.message, {"role": "user", "content": "Go on."}]
        session.save(tmp_path / "chat.kvs")
        with Session.load(tmp_path / "chat.kvs", model, tokenizer, capacity_tokens=1600) as loaded:
            assert loaded.spans == session.spans
            a, b = (x.chat(messages, max_new_tokens=40, min_new_tokens=40) for x in (session, loaded))
            assert a.token_ids == b.token_ids
            assert b.report.reused_tokens == a.report.reused_tokens > 100
            assert b.report.turn == 1
            assert (b.report.anchors > 0) == (rho > 0)
            assert state(session) == state(loaded)


def test_what_a_residual_head_told_comes_back(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    head = ResidualHead(HeadConfig(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    head.save(tmp_path / "head")
    settings = {"kept": 300, "residual": str(tmp_path / "head")}
    session = begun(model, tokenizer, "intentkv", policy_settings=settings)
    assert session._sequence.worth is not None
    session.save(tmp_path / "one.kvs")
    check_same(session, Session.load(tmp_path / "one.kvs", model, tokenizer))
    (tmp_path / "head").unlink()
    check_refused(tmp_path / "one.kvs", model, tokenizer, "head.? is no residual head")


def test_sliding_window_layers_come_back(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    gemma = tiny("gemma3", vocab_size=VOCAB)
    with Session(gemma, tokenizer, "uniform", capacity_tokens=2400) as session:
        feed(session, 300)
        session.save(tmp_path / "gemma.kvs")
        with Session.load(tmp_path / "gemma.kvs", gemma, tokenizer) as loaded:
            for end in (301, 302, 420):
                assert torch.equal(feed(session, end), feed(loaded, end))
            assert loaded.bytes_in_use == session.bytes_in_use


def test_an_empty_session_comes_back(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with Session(model, tokenizer, "role", 4.0, capacity_tokens=500) as session:
        session.save(tmp_path / "empty.kvs")
        with Session.load(tmp_path / "empty.kvs", model, tokenizer) as loaded:
            assert loaded.token_ids == []
            assert torch.equal(feed(session, 100), feed(loaded, 100))


def test_others_reuse_what_was_loaded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    # of what snapkv thinned, the first page alone is as anyone would compute it
    for policy, reused in (("uniform", 832), ("snapkv", 32)):
        begun(model, tokenizer, policy).save(tmp_path / policy)
        loaded = Session.load(tmp_path / policy, model, tokenizer)
        with Session(model, tokenizer, "uniform", store=loaded.store) as other:
            feed(other, 908)
            assert other.report.reused_tokens == reused


def test_what_was_cropped_is_not_saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with Session(model, tokenizer, "uniform", capacity_tokens=1000) as session:
        feed(session, 318)
        feed(session, 300)
        session.save(tmp_path / "one.kvs")
        # 12 tokens of the tail; behind them lies what was forgotten
        there = _tail(session)
        assert there[:, :12].any()
        assert there[:, 12:30].any()
        with Session.load(tmp_path / "one.kvs", model, tokenizer) as loaded:
            assert torch.equal(_tail(loaded)[:, :12], there[:, :12])
            assert not _tail(loaded)[:, 12:].any()


def _tail(session: Session) -> torch.Tensor:
    """Keys of the last page, [layers, 32, KV heads, D]."""
    buffer, page = session.store.arena.buffer, session._sequence.pages[-1]
    return from_frames(buffer[:, list(page.frames)], session.layout.head_dim, session.store.dense_dtype)[0]


# what is refused


@pytest.fixture(scope="module")
def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "one.kvs"
    with Session(model, tokenizer, "intentkv", **CASES["intentkv"], capacity_tokens=1000) as session:
        feed(session, 700)
        session.save(path)
    return path


def check_refused(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, match: str, **config: Any) -> None:
    """A store with a session in it refuses the file, and is as it was."""
    store = Store(store_config(model, 2400, **config))
    with Session(model, tokenizer, "uniform", store=store) as neighbour:
        feed(neighbour, 200)
        before = (state(neighbour), store.arena.free, list(store.queries.ref_counts), len(store.prefix), len(store.sequences))
        rotations = store.inv_freq
        with pytest.raises(ValueError, match=match):
            Session.load(path, model, tokenizer, store=store)
        store.check_integrity()
        assert before == (state(neighbour), store.arena.free, list(store.queries.ref_counts), len(store.prefix), len(store.sequences))
        assert store.inv_freq is rotations


def test_every_altered_byte_is_seen(saved: Path, tmp_path: Path) -> None:
    whole, path = saved.read_bytes(), tmp_path / "altered.kvs"
    length = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    # the length, the header with its document and checksum, the planes, the last byte
    at = {*range(8), *rng.integers(8, length, 150).tolist(), *rng.integers(length, len(whole), 30).tolist(), len(whole) - 1}
    at |= set(range(whole.index(b'"sha256"'), whole.index(b'"sha256"') + 76))
    for i in sorted(at):
        for bit in (1, 0x20):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ bit]) + whole[i + 1 :])
            with pytest.raises(ValueError, match=r"altered|truncated|no saved session|of format|of version"):
                verified.read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="altered"):
        verified.read(path)
    path.write_bytes(whole)
    verified.read(path)


def test_what_load_would_refuse_is_not_called_saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "one.kvs"
    with Session(model, tokenizer, "strata", capacity_tokens=400) as session:
        feed(session, 100)
        session.save(path)
        before = path.read_bytes()
        vars(session)["auto"] = 1
        with pytest.raises(ValueError, match=r"was not saved, for it could not be loaded: Facts.auto is 1; accepted: bool"):
            session.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["one.kvs"]
    assert path.read_bytes() == before


def test_only_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match=f"{name} is a folder or a device; accepted: the name of an ordinary file"):
            verified.write(tmp_path / name, {}, {"x": torch.zeros(1)})
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "pipe"]


def test_every_altered_bit_of_a_header_is_seen(tmp_path: Path) -> None:
    """Some flips leave JSON that is another header's: of "data_offsets":[0,128] a list of one number."""
    path = tmp_path / "one.kvs"
    verified.write(path, {"a": [1, "b"]}, {"x": torch.zeros(128, dtype=torch.uint8), "y": torch.arange(5.0)})
    whole = path.read_bytes()
    for i in range(8 + int.from_bytes(whole[:8], "little")):
        for bit in range(8):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :])
            with pytest.raises(ValueError, match=r"altered|truncated|no saved session|of format|of version"):
                verified.read(path)


def test_every_truncated_file_is_seen(saved: Path, tmp_path: Path) -> None:
    whole, path = saved.read_bytes(), tmp_path / "short.kvs"
    for n in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 4096, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match=rf"truncated.* it has {n} bytes"):
            verified.read(path)


def test_an_altered_file_changes_nothing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, saved: Path, tmp_path: Path) -> None:
    whole, path = bytearray(saved.read_bytes()), tmp_path / "altered.kvs"
    whole[-1000] ^= 4
    path.write_bytes(whole)
    check_refused(path, model, tokenizer, "altered: its SHA-256 is [0-9a-f]{64}, and [0-9a-f]{64} when it was saved")
    path.write_bytes(whole[:-5])
    check_refused(path, model, tokenizer, "truncated")
    save_file({"x": torch.zeros(3)}, path)
    check_refused(path, model, tokenizer, "no saved session")
    save_file({"x": torch.zeros(3)}, path, metadata={"format": "gguf", "version": "1", "sha256": ""})
    check_refused(path, model, tokenizer, "of format 'gguf'; accepted: 'kvstrata session'")


@pytest.mark.parametrize("version", ["1", "3"])
def test_another_version_is_named(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Version 1 held queries in the store's dense dtype, version 2 holds them at eight bits; 3 is to come."""
    with monkeypatch.context() as other:
        other.setattr(verified, "VERSION", version)
        verified.write(tmp_path / "other.kvs", *_contents(saved))
    check_refused(tmp_path / "other.kvs", model, tokenizer, f"of version '{version}'; accepted: '2'")


@pytest.mark.parametrize(
    ("change", "match"),
    [({"queries.scales": None}, "queries.scales is missing"), ({"queries": None}, "queries is missing"),
     ({"queries": lambda x: x.bfloat16()}, "queries is torch.bfloat16 .*accepted: torch.int8"),
     ({"queries.scales": lambda x: x[..., 1:]}, r"queries.scales is torch.float32 .*accepted: torch.float32 \[3, 64, 4\]"),
     ({"queries": lambda x: x[:, :, 1:], "queries.scales": lambda x: x[:, :, 1:]}, r"queries is torch.int8 .*accepted: .*3, 64, 4, 64\]")],
)  # fmt: skip
def test_wrong_queries_are_refused_before_anything_changes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, change: dict[str, Callable[[Any], Any] | None], match: str
) -> None:
    with begun(model, tokenizer, "strata") as session:
        session.save(tmp_path / "one.kvs")
        document, tensors = _contents(tmp_path / "one.kvs")
        for name, harm in change.items():
            x = tensors.pop(name)
            if harm is not None:
                tensors[name] = harm(x).contiguous()
        verified.write(tmp_path / "wrong.kvs", document, tensors)
        store = session.store
        before = (store.arena.free, list(store.queries.ref_counts), state(session))
        # a ring's heads are known by the store that has one already
        with pytest.raises(ValueError, match=match):
            Session.load(tmp_path / "wrong.kvs", model, tokenizer, store=store)
        store.check_integrity()
        assert before == (store.arena.free, list(store.queries.ref_counts), state(session))


def _contents(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return json.loads(header["__metadata__"]["document"]), load_file(path)


@pytest.mark.parametrize(
    ("config", "match"),
    [({"codec": "kivi"}, "store whose codec is planes; that of this store is kivi"),
     ({"dense_dtype": "float32"}, "store whose dense_dtype is bfloat16; that of this store is float32"),
     ({"window": 0}, "store whose window is 64; that of this store is 0")],
)  # fmt: skip
def test_another_store_is_named(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, saved: Path, config: dict[str, Any], match: str
) -> None:
    check_refused(saved, model, tokenizer, match, **config)


@pytest.mark.parametrize(
    ("change", "match"),
    [({"num_hidden_layers": 2, "layer_types": None}, "layer_types"),
     ({"num_key_value_heads": 4}, "num_kv_heads is 2; that of this model is 4"),
     ({"head_dim": 128}, "head_dim is 64; that of this model is 128"), ({"num_attention_heads": 8}, "num_qo_heads is 4")],
)  # fmt: skip
def test_another_models_geometry_is_named(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, saved: Path, change: dict[str, Any], match: str
) -> None:
    other = tiny("qwen2", **{"vocab_size": VOCAB} | change)
    check_refused(saved, other, tokenizer, match)


def test_another_models_numbers_are_noticed(tokenizer: PreTrainedTokenizerBase, saved: Path) -> None:
    """Keys of one fine-tune are none of another's, though they fit."""
    other = tiny("qwen2", vocab_size=VOCAB)
    Session.load(saved, other, tokenizer).reset()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    check_refused(saved, other, tokenizer, "model whose weights is")
    check_refused(saved, tiny("qwen2", vocab_size=VOCAB).bfloat16(), tokenizer, "dtype is float32; that of this model is bfloat16")
    check_refused(saved, tiny("qwen3", vocab_size=VOCAB), tokenizer, "family is qwen2; that of this model is qwen3")


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [("settled", 99, "99 settled"), ("pages", [[4, 1]], "1 pages"), ("pages", [[5, 1]], r"pages\[0\] is 5; accepted: 0, 2, 3, 4, 8, 16"),
     ("plan", None, "Facts.plan has None"), ("queries_from", 0, "queries is"),
     ("memory_positions", [1, 2, 3], "memory is")],
)  # fmt: skip
def test_a_whole_file_of_wrong_books_is_refused(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, saved: Path, tmp_path: Path, name: str, value: Any, match: str
) -> None:
    document, tensors = _contents(saved)
    document["sequence"][name] = value
    if name == "queries_from":
        tensors["queries"] = tensors["queries"][:, 1:].contiguous()
    verified.write(tmp_path / "wrong.kvs", document, tensors)
    check_refused(tmp_path / "wrong.kvs", model, tokenizer, match)


def test_a_store_without_room_raises_its_own_error(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "large.kvs"
    with Session(model, tokenizer, "uniform", policy_settings={"tier": "BF16"}, capacity_tokens=1000) as session:
        feed(session, 900)
        session.save(path)
    with pytest.raises(OutOfFramesError, match="asked for"):
        Session.load(path, model, tokenizer, capacity_tokens=400)
    store = Store(store_config(model, 800))
    with Session(model, tokenizer, "uniform", store=store) as past:
        feed(past, 300)
    with Session(model, tokenizer, "full", store=store) as neighbour:
        feed(neighbour, 200)
        # what is left in the prefix index stays too
        before = (store.arena.free, len(store.prefix), list(store.queries.ref_counts), state(neighbour))
        assert store.prefix.reclaimable() > 0
        with pytest.raises(OutOfFramesError, match=r"asked for \d+ frames, \d+ are free; held by: sequence"):
            Session.load(path, model, tokenizer, store=store)
        store.check_integrity()
        assert before == (store.arena.free, len(store.prefix), list(store.queries.ref_counts), state(neighbour))
        assert store.sequences == [neighbour._sequence]


# what fails while it is saved


@pytest.mark.parametrize("harm", ["alter", "cut", "swap", "full"])
def test_a_save_that_fails_leaves_the_file_before_it(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    path = tmp_path / "one.kvs"
    path.write_bytes(before := saved.read_bytes())
    seal = verified._seal

    def harmed(temporary: Path) -> None:
        if harm == "full":
            raise OSError(28, "No space left on device")
        if harm == "swap":
            document, tensors = _contents(temporary)
            tensors["planes"] = tensors["planes"] ^ 1
            text = json.dumps(document)
            metadata = {"format": verified.FORMAT, "version": verified.VERSION, "document": text, "sha256": verified._ZEROS}
            save_file(tensors, temporary, metadata=metadata)
        seal(temporary)
        whole = bytearray(temporary.read_bytes())
        if harm == "alter":
            whole[-7] ^= 1
        temporary.write_bytes(whole[:-9] if harm == "cut" else whole)

    monkeypatch.setattr(verified, "_seal", harmed)
    match = {"alter": "not saved.*altered", "cut": "not saved.*truncated", "swap": "reads back otherwise", "full": "No space left"}[harm]
    with Session(model, tokenizer, "uniform", capacity_tokens=400) as session:
        feed(session, 200)
        with pytest.raises(OSError, match=match):
            session.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["one.kvs"]


def test_plans_come_back_from_json() -> None:
    plan = Plan(
        (Tier.BF16, Tier.EVICTED, Tier.INT3), Tier.INT2, {4: 7, 1: 1 << 31}, Anchors(5, Tier.INT8, "linear", 0, True, "fp8"),
        Thinning(3, 2, Tier.INT4, frozenset({9, 0}), "intent", asks=(Ask(1, 4, 2),), decay=0.5, residual="head", tags=b"\0\xff"),
        Weighing(Tier.INT8, 3, 1),
    )  # fmt: skip
    assert parsed(Plan, json.loads(json.dumps(plain(plan)))) == plan
    for wrong, match in ((17, "Plan has 17"), ({"tiers": []}, "Plan has tiers; accepted: tiers, default")):
        with pytest.raises(ValueError, match=match):
            parsed(Plan, wrong)
