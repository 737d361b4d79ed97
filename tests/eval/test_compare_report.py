"""The page of the comparison: its coordinates by hand, what it shows in a real browser, and that it needs nothing but itself."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from kvstrata.eval.compare_report import read_results, write_compare_report
from kvstrata.eval.pareto import SHAPES, Point, front, outline, pareto_chart, shapes_of
from kvstrata.eval.peers.rows import make_rows
from kvstrata.eval.results import Setting
from kvstrata.eval.token_map import ROW, role_bytes, rows_of, turn_chart
from kvstrata.eval.traces import Trace
from kvstrata.eval.watched import Watched, attention_of, watch
from kvstrata.types import PAGE_SIZE, Tier
from tests.eval.browser import browse
from tests.eval.fakes import MESSAGES, TOOL, tiny_model
from tests.eval.peers.test_study import run


def results() -> dict[str, Any]:
    """A run of every row, with figures that rise and fall with its place."""
    runs = []
    for i, row in enumerate(make_rows("qwen05", "qwen05")):
        bits = 16.0 if row.masked else 2.2 + i % 13
        runs.append(run(row.group, row.family, row.label, "a", bits, 0.5 / (i + 1), held=bits + (row.family == "strata"),
                        call_top1=1 - 0.4 / (i + 1), fact_logp=[-0.1 - i / 9]))  # fmt: skip
    return {"model": "<qwen> & co", "runs": runs, "missing": {"KVzap": "kvpress==0.5.5 is needed"}}


@pytest.fixture(scope="module")
def watched(model_path: Callable[[str], Path]) -> Watched:
    tokenizer = AutoTokenizer.from_pretrained(model_path("smollm2"))
    trace = Trace("odd <b>", [*MESSAGES[:1], {"role": "user", "content": "A line of the report. " * 120}, *MESSAGES[1:]], [TOOL])
    return watch(tiny_model(), tokenizer, trace, Setting("hyquant", Tier.INT2, window=64), "tiny")


@pytest.fixture(scope="module")
def page(watched: Watched, tmp_path_factory: Any) -> Path:
    return write_compare_report(tmp_path_factory.mktemp("compare") / "compare.html", [results()], watched)


def test_the_front_is_what_nothing_beats() -> None:
    points = [Point("f", "g", name, bits, bits, value) for name, bits, value in
              (("a", 2, 0.5), ("b", 3, 0.6), ("c", 4, 0.1), ("d", 4, 0.2), ("e", 8, 0.1))]  # fmt: skip
    assert [p.label for p in front(points, low=True)] == ["a", "c"]
    assert [p.label for p in front(points, low=False)] == ["a", "b"]


def test_a_charts_coordinates() -> None:
    points = [Point("x", "ours", "x 2", 2, 2, 0.1), Point("x", "ours", "x 8", 8, 9, 0.001), Point("y", "ours", "y", 4, 4, 0.01)]
    chart = pareto_chart(points, log=True, low=True)
    (a, b), (c,) = (f.marks for f in chart.families)
    # four is between two and eight, and 0.01 between 0.1 and 0.001, on both logarithmic scales
    assert c.x == pytest.approx((a.x + b.x) / 2)
    assert c.y == pytest.approx((a.y + b.y) / 2)
    assert (a.held_x == a.x, b.held_x > b.x) == (True, True)
    assert b.text == "x 8: 8.00 bits, 9.00 held, 0.001"
    assert [f.shape for f in chart.families] == ["circle", "square"]
    inside = [m for f in chart.families for m in f.marks]
    assert all(chart.left < m.x < chart.right and chart.top < m.y < chart.bottom for m in inside)
    assert [t.text for t in chart.y_ticks] == ["0.001", "0.003", "0.01", "0.03", "0.1"]
    # zero has no logarithm, and is left out
    assert len(pareto_chart([*points, Point("z", "ours", "z", 5, 5, 0.0)], log=True, low=True).families) == 2
    with pytest.raises(ValueError, match="no point has a measure"):
        pareto_chart([Point("z", "ours", "z", 5, 5, float("nan"))], log=False, low=True)


def test_families_of_a_group_differ_in_shape() -> None:
    rows = make_rows("qwen05", "qwen05")
    shapes = shapes_of([Point(r.family, r.group, r.label, 4, 4, 1) for r in rows])
    for group in {r.group for r in rows}:
        families = {r.family for r in rows if r.group == group}
        assert len({shapes[f] for f in families}) == len(families)
    outlines = {outline(shape, 0, 0) for shape in SHAPES}
    assert len(outlines) == len(SHAPES)
    for path in outlines:
        assert max(abs(float(x)) for x in re.findall(r"-?[\d.]+", path)) <= 10


def test_attention_is_the_models_own(model_path: Callable[[str], Path]) -> None:
    model, ids = tiny_model(), list(range(40, 140))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(torch.tensor([ids]), output_attentions=True).attentions
    wanted = sum(m[0, :, -64:].sum((0, 1)) for m in maps).double().numpy()
    model.set_attn_implementation("sdpa")
    assert np.allclose(attention_of(model, ids), wanted / wanted.sum(), atol=1e-6)


def test_every_token_is_on_the_map_once(watched: Watched) -> None:
    n = watched.tokens
    assert n > ROW
    rows = rows_of(watched)
    assert [r.start for r in rows] == list(range(0, n, ROW))
    for r in rows:
        for lane in (r.roles, r.tiers):
            assert [x.at for x in lane] == [0, *np.cumsum([x.count for x in lane])[:-1]]
            assert sum(x.count for x in lane) == r.count
    for role in {s.role for s in watched.conversation.spans}:
        on_map = sum(x.count for r in rows for x in r.roles if x.kind == role)
        assert on_map == sum(s.end - s.start for s in watched.conversation.spans if s.role is role)
    low = sum(x.count for r in rows for x in r.tiers if x.kind == "INT2")
    assert low == PAGE_SIZE * watched.page_bits.count(2) > 0
    # anchors: at most every layer and head, and as many as the report says
    assert 0 < watched.anchors.max() <= 1
    assert watched.anchors.sum() == pytest.approx(watched.reports[-1].anchors, abs=1)
    assert watched.attention.sum() == pytest.approx(1)


def test_bytes_by_step_add_up(watched: Watched) -> None:
    chart = turn_chart(watched)
    assert len(chart.bars) == len(watched.reports) == len(watched.ends)
    for i, (bar, report) in enumerate(zip(chart.bars, watched.reports, strict=True)):
        assert sum(role_bytes(watched, i).values()) == pytest.approx(report.bytes_stored)
        whole = sum(p.height for p in bar.parts)
        assert whole / (chart.bottom - bar.bf16_y) == pytest.approx(report.bytes_stored / report.bytes_bf16)
    assert chart.bars[0].reuse == 0
    assert chart.bars[-1].reuse > 0.5


def test_the_page_loads_and_runs_nothing(page: Path) -> None:
    html = page.read_text()
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://|<script|javascript:|\son\w+=""", html)
    for text in ("&lt;qwen&gt; &amp; co", "odd &lt;b&gt;", "kvpress==0.5.5 is needed", "AdaKV SnapKV"):
        assert text in html
    assert "<qwen>" not in html
    assert html.count('class="mark"') > 3 * len(results()["runs"])


@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_a_browser_paints_it(page: Path, tmp_path: Path, scheme: int) -> None:
    png = tmp_path / "page.png"
    browse(page, tmp_path / "a", "", f"--screenshot={png}", "--window-size=1240,1500", f"--blink-settings=preferredColorScheme={scheme}")
    pixels = np.asarray(Image.open(png).convert("RGB")).astype(int)
    assert pixels.shape == (1500, 1240, 3)
    paper = pixels[700, 2]
    assert (paper.mean() < 60) == (scheme == 0)
    # each group's colour is there: of marks, and of its name's line
    colours = ["#23201b", "#d55e00", "#0072b2", "#009e73", "#a8487f"] if scheme else ["#ece6da", "#f0803a", "#5aaee6", "#2cc399", "#dd96bd"]
    for colour in colours:
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - wanted).sum(-1) < 12).sum() > 60, colour
    assert 0.02 < (np.abs(pixels - paper).sum(-1) > 30).mean() < 0.6


def test_nothing_is_wider_than_the_page_and_it_prints(page: Path, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.png"
    browse(page, tmp_path / "a", "", f"--screenshot={narrow}", "--window-size=700,1200", "--blink-settings=preferredColorScheme=1")
    pixels = np.asarray(Image.open(narrow).convert("RGB")).astype(int)
    paper = pixels[600, 1]
    assert (np.abs(pixels[:, -20:] - paper).sum(-1) > 30).mean() < 0.05
    pdf = tmp_path / "page.pdf"
    browse(page, tmp_path / "b", "", f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    assert pdf.read_bytes().startswith(b"%PDF")
    assert pdf.read_bytes().count(b"/Type /Page\n") >= 2


def test_files_that_are_no_results_are_named(tmp_path: Path) -> None:
    for text, message in (("{", "is no JSON"), ("[]", "holds no runs"), ('{"model": "m", "runs": []}', "holds no runs"),
                          ('{"model": "m", "runs": [{"kl": 1}]}', "has a run without bits, call_kl")):  # fmt: skip
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_results(path)
    path.write_text(json.dumps(results()))
    assert read_results(path)["model"] == "<qwen> & co"
    with pytest.raises(ValueError, match="the report needs results, a conversation, or both"):
        write_compare_report(tmp_path / "x.html", [], None)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"group": "x"}, "group of run 'strata, 2.6' is 'x'; accepted: ours, papers"), ({"group": []}, "group of run"),
     ({"label": ["strata"]}, "label of run .*; accepted: text"), ({"tokens": 0}, "tokens of run .* is '0'; accepted: a whole number above"),
     ({"scored": True}, "scored of run"), ({"bits": "3"}, "bits of run .* is '3'; accepted: a number above 0"), ({"held": None}, "held of"),
     ({"held": float("nan")}, "held of run .* is 'nan'"), ({"bits": 10**400}, "bits of run"), ({"kl": None}, "kl of run"),
     ({"call_kl": "0"}, "call_kl of run .*; accepted: a number, or null"), ({"fact_logp": -1.0}, "fact_logp of run .*; accepted: a list"),
     ({"fact_logp": [None]}, "fact_logp of run"), ({"facts_hit": -1}, "facts_hit of run")],
)  # fmt: skip
def test_runs_of_other_values_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    data, path = results(), tmp_path / "x.json"
    data["runs"][0] |= change
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"x\.json: " + message):
        read_results(path)


@pytest.mark.parametrize("missing", [None, [], "KVzap", {"KVzap": 1}])
def test_other_lists_of_what_is_missing_are_named(tmp_path: Path, missing: Any) -> None:
    (tmp_path / "x.json").write_text(json.dumps(results() | {"missing": missing}))
    with pytest.raises(ValueError, match=r"x\.json: missing is .*; accepted: what kept a family from running"):
        read_results(tmp_path / "x.json")


def test_endless_brackets_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is no JSON"):
        read_results(tmp_path / "x.json")


def test_measures_that_are_no_number_or_nothing_are_shown(tmp_path: Path) -> None:
    data, path = results(), tmp_path / "x.json"
    data["runs"][0] |= {"kl": 0.0, "call_kl": None, "call_top1": None, "fact_logp": []}
    data["runs"][1] |= {"kl": float("nan"), "top1": float("nan")}
    path.write_text(json.dumps(data))
    text = write_compare_report(tmp_path / "x.html", [read_results(path)], None).read_text()
    assert "KL 0.0000 (strata, 2.6)" in text
    assert "inf times lower" in text
