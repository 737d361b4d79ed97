"""The study's rows, tables and files, and what it measures from one forward pass, against plain formulas."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kvstrata.eval import hyquant_study as study
from kvstrata.eval.continuation import along, continue_greedily
from kvstrata.eval.conversation import render
from kvstrata.eval.hyquant_probe import Kept, coverage, output_error, overhead, page_mass, through
from kvstrata.eval.protocols import make_task, run_reference
from kvstrata.eval.results import Setting
from kvstrata.eval.traces import Trace
from kvstrata.ops.codecs import make_codec
from kvstrata.policy import Signals, make_policy
from kvstrata.session import Session
from kvstrata.types import PAGE_SIZE, Tier
from tests.eval.fakes import MESSAGES, TOOL, tiny_model

LONG = Trace("long_1", [*MESSAGES[:1], {"role": "user", "content": "A line of the report. " * 60}, *MESSAGES[1:]], [TOOL])


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_path("smollm2"))


def test_every_row_is_a_setting_that_a_session_takes(tokenizer: Any) -> None:
    rows, model = [*study.make_rows(), *study.generation_rows()], tiny_model()
    assert len({(r.group, r.label) for r in rows}) == len(rows)
    for row in rows:
        Session(model, tokenizer, capacity_tokens=64, **row.setting.session_arguments())
    assert {r.group for r in rows} <= set(study.GROUPS)


def test_rows_run_once_and_two_studies_share_a_file(tokenizer: Any, tmp_path: Path) -> None:
    wanted = ("INT2", "INT2 + 5%", "INT2, third plane on 50% of pages", "5% and nothing else")
    rows = [r for r in study.make_rows() if r.label in wanted]
    out, model = tmp_path / "study", tiny_model()
    mine: dict[str, Any] = {"runs": []}
    theirs: dict[str, Any] = {"runs": []}
    study.study(model, tokenizer, "tiny", LONG, rows[:2], mine, out)
    # a study that read the file before the other wrote it
    study.study(model, tokenizer, "tiny", LONG, rows[2:], theirs, out)
    runs = json.loads(out.with_suffix(".json").read_text())["runs"]
    assert sorted((r["group"], r["label"]) for r in runs) == sorted((r.group, r.label) for r in rows)
    before = out.with_suffix(".json").read_text()
    study.study(model, tokenizer, "tiny", LONG, rows, json.loads(before), out)
    assert out.with_suffix(".json").read_text() == before
    study.study(model, tokenizer, "tiny", LONG, rows[:1], json.loads(before), out, again=True)
    anew = json.loads(out.with_suffix(".json").read_text())["runs"]
    sizes = [{(r["group"], r["label"]): r["kl"] for r in of} for of in (runs, anew)]
    assert len(anew) == len(runs) and sizes[0] == sizes[1]
    assert (anew[-1]["group"], anew[-1]["label"]) == (rows[0].group, rows[0].label)
    of = {r["label"]: r for r in runs if r["protocol"] == "oneshot"}
    assert of["INT2 + 5%"]["anchors"] > 0 == of["INT2"]["anchors"]
    assert of["INT2, third plane on 50% of pages"]["pages"]["3"] > 0
    assert of["5% and nothing else"]["kl"] > of["INT2 + 5%"]["kl"]
    table = out.with_suffix(".md").read_text()
    for r in of.values():
        assert f"| {r['label']} | {r['bits']:.2f} | {r['kl']:.4f} |" in table


def test_a_replayed_first_chunk_chooses_the_same_anchors(tokenizer: Any) -> None:
    """Of a chunk that is not computed again, the newest queries are known all the same."""
    model = tiny_model()
    task = make_task("oneshot", render(tokenizer, LONG))
    reference = run_reference(model, task)
    held = []
    for prefill in (reference.prefill, None):
        with Session(model, tokenizer, "hyquant", policy_settings={"rho": 0.05, "tier": Tier.INT2}) as session:
            with study.replayed(model, prefill):
                session.feed(task.conversation.token_ids[: task.chunks[0]], logits_to_keep=1)
            (s,) = session.store.sequences
            held.append([page.positions.tolist() for page in s.anchors])
    assert held[0] == held[1] != []
    assert any(len(set(map(tuple, layer))) for layer in held[0][0])


def test_third_planes_go_to_the_pages_of_most_mass() -> None:
    mass = (9.0, 1.0, 5.0, 2.0, 7.0)
    policy = study.ThirdPlanes(make_policy("uniform", tier=Tier.INT2), 0.5, mass)
    plan = policy.plan((), 8 * PAGE_SIZE, Signals())
    # the sink is no candidate; of four pages the two of most mass; pages that were not measured stay
    assert plan.tiers == (Tier.BF16, Tier.INT2, Tier.INT3, Tier.INT2, Tier.INT3, Tier.INT2, Tier.INT2, Tier.INT2)
    later = policy.plan((), 20 * PAGE_SIZE, Signals())
    assert later.tiers[:8] == plan.tiers


def test_coverage_is_the_share_of_what_softmax_gives() -> None:
    torch.manual_seed(0)
    n, d = 400, 64
    q, k = torch.randn(4, n, d), torch.randn(2, n, d)
    k[:, 7] = 4 * q.mean(0).mean(0)
    k[1, 300] *= 3
    got = coverage(q, k, 0.2)
    positions = torch.linspace(n // 2, n - 1, 256).long().unique()
    mass = torch.zeros(4, len(positions), n, dtype=torch.float64)
    for head in range(4):
        for row, t in enumerate(positions.tolist()):
            mass[head, row, : t + 1] = torch.softmax(0.2 * k[head // 2, : t + 1].double() @ q[head, t].double(), -1)
    share = []
    for head in range(2):
        own = mass[2 * head : 2 * head + 2]
        top = own.sum((0, 1)).argsort(descending=True)[:20]
        share.append(own[..., top].sum(-1).mean())
    assert got["top 5%"] == pytest.approx(float(sum(share)) / 2, abs=1e-5)
    window = [mass[:, row, max(0, t - 127) : t + 1].sum(-1).mean() for row, t in enumerate(positions.tolist())]
    assert got["window"] == pytest.approx(float(sum(window)) / len(window), abs=1e-5)
    assert got["top 1%"] < got["top 5%"] < got["top 5% + window"] <= 1


def test_output_error_falls_with_what_is_kept() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(4, 600, 64), torch.randn(2, 600, 64), torch.randn(2, 600, 64)
    planes = make_codec("planes")

    def error(tier: Tier, **kept: Any) -> float:
        return output_error(q, k, v, 0.3, 512, Kept("", planes, tier, **kept))

    assert error(Tier.INT2) > error(Tier.INT4) > error(Tier.INT8) > 0
    assert error(Tier.INT2) > error(Tier.INT2, sinks=True, window=64) > error(Tier.INT2, sinks=True, window=64, rho=0.2)
    # nothing is left to coarsen
    assert error(Tier.INT2, window=512) == 0
    assert error(Tier.INT2, rho=1.0) == 0


def test_anchors_of_eight_bits_lose_little_and_those_of_fp8_more() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(4, 600, 64), torch.randn(2, 600, 64), torch.randn(2, 600, 64)
    # where everything is an anchor the body's error is nowhere
    error = {x.label: output_error(q, k, v, 0.3, 512, replace(x, rho=1.0)) for x in study.anchor_formats()}
    for body in ("INT2 + 5%", "INT4 + 2%"):
        assert error[f"{body} BF16"] == 0 < 5 * error[f"{body} INT8"] < error[f"{body} FP8 e4m3"]


def test_anchors_come_back_from_pages_as_the_codec_has_them() -> None:
    k, v = torch.randn(2, 2, 40, 64, generator=torch.Generator().manual_seed(4))
    for name, bound in (("planes", 0.01), ("int8", 0.01), ("hyquant-fp", 0.03)):
        for x, back in zip((k, v), through(make_codec(name), k, v), strict=True):
            assert back.shape == x.shape and 1e-4 < (back - x).norm() / x.norm() < bound
    # one value for a slot of no use: the range of the last page is that of its tokens
    page = through(make_codec("planes"), k[:, 32:].repeat(1, 4, 1), v[:, 32:].repeat(1, 4, 1))
    assert torch.equal(through(make_codec("planes"), k, v)[0][:, 32:], page[0][:, :8])


def test_overhead_counts_what_a_layout_counts() -> None:
    (row,) = [r for r in overhead() if (r["tokens"], r["tier"], r["anchors"]) == (32768, "INT2", "INT8")]
    # 36 layers, 8 heads, frames of 1184 bytes: INT2 has two, INT4 four, INT8 eight, BF16 fourteen
    frame, pages = 36 * 8 * 1184, 1024
    anchors = -(-int(0.05 * (pages - 9) * 32 + 0.999) // 32)
    expected = frame * (2 * (pages - 9) + 8 * anchors + 14 * 9) + 36 * 64 * 32 * (128 + 4)
    assert row["over_strict"] == pytest.approx(expected / (frame * 4 * pages) - 1)
    assert row["bits"] == pytest.approx(8 * expected / (32768 * 36 * 8 * 128 * 2))


def test_page_mass_sums_what_keys_get() -> None:
    torch.manual_seed(2)
    q, k = [torch.randn(4, 10, 64) for _ in range(2)], [torch.randn(2, 70, 64) for _ in range(2)]
    mass = page_mass(q, k, 0.2)
    expected = torch.zeros(70, dtype=torch.float64)
    for a, b in zip(q, k, strict=True):
        for head in range(4):
            for t in range(10):
                expected[: 61 + t] += torch.softmax(0.2 * b[head // 2, : 61 + t].double() @ a[head, t].double(), -1)
    assert mass == pytest.approx(expected[:64].view(2, 32).sum(1).numpy(), rel=1e-4)


def test_a_continuation_is_greedy_and_a_full_cache_follows_it(tokenizer: Any) -> None:
    model = tiny_model()
    context = render(tokenizer, LONG).token_ids[:200]
    reference, tokens = continue_greedily(model, context, 12)
    expected = model.generate(torch.tensor([context]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, 200:].tolist()
    assert tokens == expected
    exact = along(model, Setting("full", dense_dtype="float32"), reference, tokens)
    coarse = along(model, Setting(tier=Tier.INT2), reference, tokens)
    assert len(exact) == 11 and max(exact) < 1e-5 < sum(coarse)


def test_verdicts_compare_what_the_same_conversations_gave() -> None:
    def run(label: str, trace: str, kl: float, bits: float, group: str = "anchors") -> dict[str, Any]:
        return {
            "model": "qwen05", "group": group, "label": label, "trace": trace, "tokens": 5000, "bits": bits, "scored": 100, "kl": kl,
            "top1": 1.0, "call_tokens": 0, "call_kl": None, "call_top1": None, "fact_logp": [], "facts_hit": 0,
        }  # fmt: skip

    runs = [
        run("INT2", "a", 0.03, 2.6),
        run("INT2", "b", 9.0, 2.6),
        run("INT2 + 5%", "a", 0.01, 3.4),
        run("INT2 + 5% INT8", "a", 0.011, 3.0),
    ]
    lines = study.verdicts(runs)
    assert "ratio 0.333: met" in lines[0] and "conversations: 1" in lines[0]
    assert "of that gain: 5.0%: met; takes half of its bytes: 50%: met" in lines[1]
    runs[2]["kl"] = 0.02
    assert "MISSED" in study.verdicts(runs)[0]
    assert "met" in lines[-1] and "strict INT4" in lines[-1]


def test_one_forward_pass_and_one_long_reply_fill_their_tables(tokenizer: Any, tmp_path: Path) -> None:
    model, out = tiny_model(), tmp_path / "study"
    covered, errors = study.attention_of(model, render(tokenizer, LONG), study.what_is_kept(), lengths=(256, 4096))
    # a conversation is no longer than it is
    assert len(covered) == 2 and list(errors) == [256]
    mean = {label: sum(x) / 2 for label, x in errors[256].items()}
    assert mean["INT8"] < mean["INT4 + 5%"] < mean["INT4"] < mean["INT2"]
    data: dict[str, Any] = {"runs": []}
    study.from_one_pass(model, tokenizer, "tiny", LONG, "error", study.what_is_kept(), data, out)
    rows = study.generation_rows()[:1]
    study.generate(model, tokenizer, "tiny", LONG, rows, 70, data, out)
    runs = json.loads(out.with_suffix(".json").read_text())["runs"]
    # a tiny conversation has none of the study's prefix lengths
    assert [r["group"] for r in runs] == ["coverage", "generation"]
    assert len(runs[1]["parts"]) == 2 and runs[1]["scored"] == 69
    table = out.with_suffix(".md").read_text()
    assert f"| tiny, long_1 | INT2 | {runs[1]['kl']:.4f} | {runs[1]['parts'][0]:.4f} {runs[1]['parts'][1]:.4f} |" in table
    assert f"| tiny, long_1 | {runs[0]['tokens']} | {runs[0]['share']['top 1%']:.3f} |" in table
    study.generate(model, tokenizer, "tiny", LONG, rows, 70, json.loads(out.with_suffix(".json").read_text()), out)
    assert out.with_suffix(".md").read_text() == table
