"""Lessons against attention counted by hand; training that learns, repeats and never ends below the rule."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvstrata.adapters.hf import cache_keyword
from kvstrata.calibrate.run import Sample
from kvstrata.intent.lessons import MOST_CUTS, cuts_of, lessons, retold
from kvstrata.intent.run import train_on
from kvstrata.intent.train import mass_kept, scores, split
from kvstrata.ops.residual import HeadConfig, ResidualHead, load_head
from kvstrata.session import Session
from kvstrata.types import Role, Span
from tests.models import tiny

LENGTHS = ((Role.INST, 20), (Role.USER, 10), (Role.OBS, 40), (Role.ASSISTANT, 6))


def conversation(turns: int, seed: int = 0) -> tuple[list[int], tuple[Span, ...]]:
    spans: list[Span] = [Span(0, 20, Role.INST, 0)]
    for turn in range(1, turns + 1):
        for role, length in LENGTHS[1:]:
            spans.append(Span(spans[-1].end, spans[-1].end + length, role, turn))
    ids = torch.randint(3, 300, (spans[-1].end,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids, tuple(spans)


@torch.no_grad()
def told_again(model: Any, ids: list[int], **block: int) -> list[torch.Tensor]:
    cache, tokens = DynamicCache(config=model.config), torch.tensor([ids])
    model(tokens, **{cache_keyword(model): cache})
    out = retold(model, tokens, cache, **block)
    assert cache.get_seq_length() == len(ids)
    return out


def test_turns_end_where_another_begins() -> None:
    _, spans = conversation(3)
    assert cuts_of(spans) == [132]
    assert len(cuts_of(conversation(30)[1])) == MOST_CUTS
    assert cuts_of(conversation(2)[1]) == []


def test_labels_are_the_largest_attention_of_later_asking_tokens() -> None:
    model, (ids, spans) = tiny("llama"), conversation(3)
    found = lessons(model, ids, spans, tokens=1000)
    assert [(x.cut, len(x.own)) for x in found] == [(132, 3)]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        weights = model(torch.tensor([ids]), output_attentions=True, past_key_values=DynamicCache(config=model.config)).attentions
        model.set_attn_implementation("sdpa")
    # after turn 2: tokens of turn 1 but the sink page's, which alone are neither instructions nor of the newest turn
    asking = [p for s in spans for p in range(s.start, s.end) if s.role is not Role.OBS and s.role is not Role.INST and p >= 132]
    again = told_again(model, ids)
    for layer in range(3):
        later, label = found[0].later[layer], found[0].label[layer]
        want = weights[layer][0, :, asking].unflatten(0, (2, -1)).amax((1, 2))[:, 32:76]
        assert later.shape == want.shape
        assert (later - want).abs().max() < 1e-4
        halves = [x / x.sum(-1, keepdim=True) for x in (later, again[layer][:, 32:76])]
        assert (label - sum(halves)).abs().max() < 1e-4


def test_what_is_told_again_is_what_its_queries_attend() -> None:
    model, (ids, _) = tiny("llama"), conversation(2)
    n = len(ids)
    want = torch.zeros(3, 2, n)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for start in range(0, n, 60):
            # a block right behind the whole conversation
            whole = torch.tensor([ids + ids[start : start + 60]])
            for layer, paid in enumerate(model(whole, output_attentions=True).attentions):
                want[layer] = torch.maximum(want[layer], paid[0, :, n:, :n].unflatten(0, (2, -1)).amax((1, 2)))
    model.set_attn_implementation("sdpa")
    found = torch.stack(told_again(model, ids, block=60))
    assert (found - want).abs().max() < 1e-4


def test_two_turns_teach_nothing() -> None:
    ids, spans = conversation(2)
    with pytest.raises(ValueError, match="fewer than three"):
        lessons(tiny("llama"), ids, spans)


def test_conversations_are_split_without_overlap() -> None:
    parts = split([str(i) for i in range(11)])
    assert sorted(i for part in parts for i in part) == list(range(11))
    assert all(parts)
    assert all(split(["a", "b", "c"]))
    assert split(["a", "b", "c", "d", "e"], judges=2) == ([0, 2], [1], [3, 4])
    with pytest.raises(ValueError, match="3 of them to judge by"):
        split(["a", "b", "c", "d"], judges=3)
    for names in (["a", "b"], ["a", "a", "b", "c"]):
        with pytest.raises(ValueError, match="3 or more, all different"):
            split(names)


def test_training_is_deterministic_helps_and_its_head_is_taken(tmp_path: Path) -> None:
    model = tiny("llama")
    told = [Sample(str(i), ids, spans) for i in range(5) for ids, spans in [conversation(5, i)]]
    out = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    reports: list[dict[str, Any]] = [train_on(model, "tiny", told, path, epochs=4) for path in out]
    assert reports[0]["mass_kept"] == reports[1]["mass_kept"]
    kept = reports[0]["mass_kept"]
    assert kept["oracle"]["0.25"] >= kept["rule + residual"]["0.25"]
    assert max(reports[0]["stopping"]) >= reports[0]["stopping"][0]
    assert max(reports[0]["stopping"]) > reports[0]["stopping"][0], "nothing was learned from attention that repeats"
    assert json.loads((tmp_path / "a.json").read_text())["judged_by"] == ["2"]
    # what the file says is what was measured
    head = load_head(str(out[0]))
    judged = lessons(model, told[2].token_ids, told[2].spans)
    assert abs(mass_kept(lambda x: scores(head, x), judged, 0.25) - kept["rule + residual"]["0.25"]) < 2e-3


def test_a_session_takes_a_head_and_refuses_another_models(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    ResidualHead(HeadConfig(9, 4, 2, 64)).save(path)
    with pytest.raises(ValueError, match="9 layers"):
        Session(tiny("llama"), None, "intentkv", policy_settings={"residual": str(path)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is no residual head"):
        Session(tiny("llama"), None, "intentkv", policy_settings={"residual": str(tmp_path / "none")})  # type: ignore[arg-type]
    logits = []
    ids, spans = conversation(8)
    head = ResidualHead(HeadConfig(3, 4, 2, 64))
    for step in range(3):
        if step == 2:
            with torch.no_grad():
                head.outer.normal_(generator=torch.Generator().manual_seed(0))
        head.save(path)
        settings = {"kept": 250, "turns": 0, "spare": ()} | ({} if step == 0 else {"residual": str(path)})
        with Session(tiny("llama"), None, "intentkv", policy_settings=settings, capacity_tokens=900) as session:  # type: ignore[arg-type]
            session.feed(ids[:412], tuple(s for s in spans if s.end <= 412), logits_to_keep=1)
            logits.append(session.feed(ids, spans, logits_to_keep=4))
            session.store.check_integrity()
            assert session.report.thinned > 100
    assert torch.equal(logits[0], logits[1]), "a new head changed something"
    assert not torch.equal(logits[0], logits[2])


def test_what_is_told_of_tokens_is_kept_with_them(tmp_path: Path) -> None:
    path, (ids, spans) = tmp_path / "head.safetensors", conversation(8)
    ResidualHead(HeadConfig(3, 4, 2, 64)).save(path)
    settings = {"kept": 5000, "turns": 0, "spare": (), "residual": str(path)}
    model = tiny("llama")
    with Session(model, None, "intentkv", policy_settings=settings, capacity_tokens=2000) as first:  # type: ignore[arg-type]
        first.feed(ids, spans)
        worth = first.store.sequence(first._cache.sequence_ids[0]).worth
        assert worth is not None
        assert worth.shape == (3, 2, len(ids))
        assert worth.std() > 0
        assert first.bytes_in_use >= first.frames_in_use * first.layout.frame_bytes + worth.nbytes
        # in pieces and after a crop it is the same
        first.feed(ids[:300], tuple(s for s in spans if s.end <= 300), logits_to_keep=1)
        first.feed(ids, spans, logits_to_keep=1)
        again = first.store.sequence(first._cache.sequence_ids[0]).worth
        assert again is not None
        assert (again - worth).abs().max() < 1e-2
        with Session(model, None, "intentkv", policy_settings=settings, store=first.store) as second:  # type: ignore[arg-type]
            second.feed(ids, spans, logits_to_keep=1)
            reused = second.report.reused_tokens
            told = second.store.sequence(second._cache.sequence_ids[0]).worth
            assert told is not None
            assert reused > 100
            assert told[..., :reused].isnan().all()
            assert (told[..., reused:] - worth[..., reused:]).abs().max() < 1e-2


def test_a_head_for_other_query_heads_is_refused(tmp_path: Path) -> None:
    path, (ids, spans) = tmp_path / "head.safetensors", conversation(3)
    ResidualHead(HeadConfig(3, 8, 2, 64)).save(path)
    with Session(tiny("llama"), None, "intentkv", policy_settings={"residual": str(path)}, capacity_tokens=900) as session:  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="is for 8 query heads; the model has 4"):
            session.feed(ids, spans)
        session.store.check_integrity()


def told_session(path: Path, head: ResidualHead) -> Session:
    head.save(path)
    ids, spans = conversation(8)
    settings = {"kept": 250, "turns": 0, "spare": (), "residual": str(path)}
    session = Session(tiny("llama"), None, "intentkv", policy_settings=settings, capacity_tokens=900)  # type: ignore[arg-type]
    session.feed(ids[:412], tuple(s for s in spans if s.end <= 412), logits_to_keep=1)
    return session


def loud_head(seed: int = 0, **geometry: int) -> ResidualHead:
    torch.manual_seed(seed)
    head = ResidualHead(HeadConfig(**{"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64} | geometry))
    with torch.no_grad():
        for p in (head.outer, head.straight):
            p.normal_()
    return head


def test_a_head_that_goes_or_is_anothers_before_a_step_leaves_no_frames_behind(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    session = told_session(path, loud_head())
    number = session._sequence.id
    path.unlink()
    with pytest.raises(ValueError, match="is no residual head"):
        session.store.begin([number], [[5] * 70])
    session.store.check_integrity()
    for geometry in ({"num_layers": 2}, {"num_kv_heads": 4}, {"head_dim": 32}):
        loud_head(**geometry).save(path)
        with pytest.raises(ValueError, match="the model has"):
            session.store.begin([number], [[5] * 70])
        session.store.check_integrity()
    loud_head().save(path)
    session.store.begin([number], [[5] * 70]).abort()
    session.store.check_integrity()


def test_what_one_head_told_says_nothing_to_another(tmp_path: Path) -> None:
    path, (ids, spans) = tmp_path / "head.safetensors", conversation(8)
    session = told_session(path, loud_head())
    assert session._sequence.worth.isfinite().all()
    # written again, but the same
    loud_head().save(path)
    part = tuple(Span(s.start, min(s.end, 450), s.role, s.turn) for s in spans if s.start < 450)
    session.feed(ids[:450], part, logits_to_keep=1)
    assert session._sequence.worth.isfinite().all()
    loud_head(1).save(path)
    session.feed(ids, spans, logits_to_keep=1)
    worth = session._sequence.worth
    assert worth[..., :450].isnan().all()
    assert worth[..., 450:].isfinite().all()


def test_answers_beyond_all_bounds_still_rank(tmp_path: Path) -> None:
    head = ResidualHead(HeadConfig(3, 4, 2, 64))
    with torch.no_grad():
        # it wants old tokens, by more than an exponential of the sum can hold
        head.straight[:, :, 4] = 150.0
        head.tell.fill_(60000.0)
    session = told_session(tmp_path / "head.safetensors", head)
    session.store.check_integrity()
    assert session._sequence.worth.isfinite().all()
    # the rule's part of a score spans 21, and so do distances of one to 2.2
    places = [page.positions[page.positions >= 0] for page in session._sequence.survivors]
    count = len(set(range(32, 412)) & {int(p) for x in places for p in x})
    assert 100 < count < 300
    assert max(int(p.max()) for p in places) < 412 - (412 - 32 - 160) / 2.2


def test_a_token_is_told_as_it_was_when_the_head_learned(tmp_path: Path) -> None:
    head, (ids, spans) = loud_head(), conversation(8)
    session = told_session(tmp_path / "head.safetensors", head)
    worth = session._sequence.worth
    for lesson in lessons(session.model, ids[:412], tuple(s for s in spans if s.end <= 412), tokens=10**6):
        places = [p for s in spans if s.role is not Role.INST and s.turn < lesson_turn(spans, lesson.cut) for p in range(s.start, s.end)]
        want = head.worth(slice(None), lesson.own)
        assert (worth[:, :, [p for p in places if p >= 32]] - want).abs().max() < 0.02


def test_what_a_token_received_is_counted_as_it_was_when_the_head_learned(tmp_path: Path) -> None:
    model, (ids, spans) = tiny("llama"), conversation(4)
    (found,) = [x for x in lessons(model, ids, spans, tokens=10**6) if x.cut == 188]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        weights = model(torch.tensor([ids[:188]]), output_attentions=True, past_key_values=DynamicCache(config=model.config)).attentions
        model.set_attn_implementation("sdpa")
    want = torch.stack([w[0].unflatten(0, (2, -1)).sum((1, 2)) for w in weights])
    paid = (torch.log10(want / torch.arange(188, 0, -1)) + 4) / 2
    # of turns 1 and 2, the sink page aside, as the lesson is
    assert (found.known[..., -2] - paid[..., 32:132]).abs().max() < 0.01
    head = ResidualHead(HeadConfig(3, 4, 2, 64, received=True))
    head.save(tmp_path / "head.safetensors")
    settings = {"kept": 400, "residual": str(tmp_path / "head.safetensors")}
    with Session(model, None, "intentkv", policy_settings=settings, capacity_tokens=900, dense_dtype="float32") as session:
        for cut in (76, 77, 188):
            session.feed(ids[:cut], tuple(s for s in spans if s.end <= cut) or spans[:1], logits_to_keep=1)
        received = session._sequence.received
        # the token that came alone paid nothing
        alone = torch.stack([w[0, :, 76].unflatten(0, (2, -1)).sum(1) for w in weights])
        assert received is not None
        assert (received - (want - alone)).abs().max() < 1e-3


def lesson_turn(spans: tuple[Span, ...], cut: int) -> int:
    """The newest turn before a cut."""
    return max(s.turn for s in spans if s.end <= cut)


@pytest.mark.parametrize("rank", [0, 4])
def test_all_layers_at_once_are_each_layer_by_itself(rank: int) -> None:
    torch.manual_seed(0)
    head = ResidualHead(HeadConfig(3, 4, 2, 64, rank=rank))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    (lesson,) = lessons(tiny("llama"), *conversation(3))
    every = slice(None)
    found = head(every, lesson.known.float(), head.worth(every, lesson.own), lesson.keys, lesson.asks)
    for i in range(3):
        want = head(i, lesson.known[i].float(), head.worth(i, lesson.own[i]), lesson.keys[i], lesson.asks[i])
        assert (found[i] - want).abs().max() < 1e-5


@pytest.mark.gpu
def test_a_gpu_teaches_as_a_cpu_does(tmp_path: Path) -> None:
    conversations = [Sample(str(i), *conversation(4, i)) for i in range(4)]
    reports = []
    for device in ("cpu", "cuda"):
        model = tiny("llama").to(device)
        reports.append(train_on(model, "tiny", conversations, tmp_path / f"{device}.safetensors", epochs=2))
    kept = [report["mass_kept"]["rule"]["0.25"] for report in reports]
    assert abs(kept[0] - kept[1]) < 1e-3
    assert load_head(str(tmp_path / "cuda.safetensors")).mean.device.type == "cpu"
