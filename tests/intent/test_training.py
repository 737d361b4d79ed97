"""Lessons against attention counted by hand; training that learns, repeats and never ends below the rule."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvstrata.calibrate.run import Sample
from kvstrata.intent.lessons import MOST_CUTS, cuts_of, lessons
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


def test_turns_end_where_another_begins() -> None:
    _, spans = conversation(3)
    assert cuts_of(spans) == [132]
    assert len(cuts_of(conversation(30)[1])) == MOST_CUTS
    assert cuts_of(conversation(2)[1]) == []


def test_labels_are_the_largest_attention_of_later_asking_tokens() -> None:
    model, (ids, spans) = tiny("llama"), conversation(3)
    found = lessons(model, ids, spans, tokens=1000)
    assert [x.layer for x in found] == [0, 1, 2]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        weights = model(torch.tensor([ids]), output_attentions=True, past_key_values=DynamicCache(config=model.config)).attentions
        model.set_attn_implementation("sdpa")
    # after turn 2: tokens of turn 1 but the sink page's, which alone are neither instructions nor of the newest turn
    asking = [p for s in spans for p in range(s.start, s.end) if s.role is not Role.OBS and s.role is not Role.INST and p >= 132]
    for lesson in found:
        want = weights[lesson.layer][0, :, asking].unflatten(0, (2, -1)).amax((1, 2))[:, 32:76]
        assert lesson.label.shape == want.shape
        assert (lesson.label - want).abs().max() < 1e-4
        # attention received so far, from all queries up to the end of turn 2
        got = weights[lesson.layer][0, :, :132].unflatten(0, (2, -1)).sum((1, 2))[:, 32:76]
        assert ((10 ** (lesson.known[..., 3].float() * 2 - 4)).clamp(min=1e-9) / got - 1).abs().max() < 0.02


def test_two_turns_teach_nothing() -> None:
    ids, spans = conversation(2)
    with pytest.raises(ValueError, match="fewer than three"):
        lessons(tiny("llama"), ids, spans)


def test_conversations_are_split_without_overlap() -> None:
    parts = split([str(i) for i in range(11)])
    assert sorted(i for part in parts for i in part) == list(range(11))
    assert all(parts)
    assert all(split(["a", "b", "c"]))
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
    ResidualHead(HeadConfig(9, 2, 64)).save(path)
    with pytest.raises(ValueError, match="9 layers"):
        Session(tiny("llama"), None, "intentkv", policy_settings={"residual": str(path)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is no residual head"):
        Session(tiny("llama"), None, "intentkv", policy_settings={"residual": str(tmp_path / "none")})  # type: ignore[arg-type]
    logits = []
    ids, spans = conversation(8)
    head = ResidualHead(HeadConfig(3, 2, 64))
    for step in range(3):
        if step == 2:
            with torch.no_grad():
                head.outer.weight.normal_(generator=torch.Generator().manual_seed(0))
        head.save(path)
        settings = {"kept": 250, "turns": 0, "spare": ()} | ({} if step == 0 else {"residual": str(path)})
        with Session(tiny("llama"), None, "intentkv", policy_settings=settings, capacity_tokens=900) as session:  # type: ignore[arg-type]
            session.feed(ids[:412], tuple(s for s in spans if s.end <= 412), logits_to_keep=1)
            logits.append(session.feed(ids, spans, logits_to_keep=4))
            session.store.check_integrity()
            assert session.report.thinned > 100
    assert torch.equal(logits[0], logits[1]), "a new head changed something"
    assert not torch.equal(logits[0], logits[2])
