"""The report in a real browser: what it shows, with which colours, and that it needs nothing but itself."""

import itertools
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from kvstrata.eval.chart import line_chart, nice_ticks, scatter_chart, spread
from kvstrata.eval.conversation import Conversation, render
from kvstrata.eval.evaluate import evaluate
from kvstrata.eval.report import figure, render_report, write_report
from kvstrata.eval.results import Result, Setting
from kvstrata.eval.traces import Trace
from kvstrata.types import PAGE_SIZE, Role, Tier
from tests.eval.browser import browse
from tests.eval.fakes import MESSAGES, TOOL, tiny_model

SETTINGS = (
    Setting("full", dense_dtype="bfloat16"),
    Setting(tier=Tier.INT4),
    Setting(tier=Tier.INT2),
    Setting("window", options=(("recent", 64),)),
)
ODD = 'A <b>bold</b> & "quoted" line; naïve 文字 and </script>. '


class Page(HTMLParser):
    """Elements of a page: (tag, attributes), and the text inside #tokens."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tokens: list[str] = []
        self._inside = self._token = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {k: v or "" for k, v in attrs}
        self.elements.append((tag, attributes))
        self._inside |= attributes.get("id") == "tokens"
        if self._inside and tag == "i":
            self._token = True
            self.tokens.append("")

    def handle_endtag(self, tag: str) -> None:
        self._token &= tag != "i"
        self._inside &= tag != "div"

    def handle_data(self, data: str) -> None:
        if self._token:
            self.tokens[-1] += data

    def count(self, tag: str, name: str) -> int:
        return sum(t == tag and name in a.get("class", "").split() for t, a in self.elements)


@pytest.fixture(scope="module")
def measured(model_path: Callable[[str], Path]) -> tuple[Conversation, tuple[Result, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(model_path("smollm2"))
    trace = Trace("odd", [*MESSAGES[:1], {"role": "user", "content": ODD * 12}, *MESSAGES[1:]], [TOOL])
    done = evaluate(tiny_model(), tokenizer, [trace], SETTINGS, name="tiny", needles=0)
    assert done.errors == ()
    return render(tokenizer, trace), done.results


@pytest.fixture(scope="module")
def report(measured: Any, tmp_path_factory: Any) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", *measured)


def test_the_file_loads_nothing(report: Path) -> None:
    html = report.read_text()
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://|fetch\(|XMLHttpRequest|import\(""", html)
    assert html.count("<script") == html.count("</script>") == 2


def test_every_token_is_there_once_with_its_tag(report: Path, measured: Any) -> None:
    conversation, results = measured
    page = Page(report.read_text())
    n = results[0].tokens
    assert "".join(page.tokens).replace("↵\n", "\n") == conversation.text[: conversation.starts[n - 1]] + conversation.token_text(n - 1)
    assert len(page.tokens) == n
    for role in (Role.INST, Role.USER, Role.TOOL_CALL, Role.OBS, Role.DELIM):
        # once a span in the text, once in the legend
        assert page.count("span", f"r-{role}") == sum(s.role is role for s in conversation.spans_until(n)) + 1


def test_the_table_is_the_results(report: Path, measured: Any) -> None:
    html = report.read_text()
    for r in measured[1]:
        size = f"{r.outcomes[0].bytes_in_use / 2**20:.2f}"
        for text in (r.label, f"{r.bits_per_element:.2f}", figure(r.kl_mean), f"{100 * r.top1:.1f}%", size):
            assert text in html


def test_a_browser_colours_tokens_by_tag_and_by_tier(report: Path, measured: Any, tmp_path: Path) -> None:
    by_tag = Page(browse(report, tmp_path / "a", "", "--dump-dom"))
    assert ("div", {"id": "tokens", "class": "tag", "tabindex": "0"}) in by_tag.elements
    by_tier = Page(browse(report, tmp_path / "b", "#tier=2", "--dump-dom"))
    assert any(a.get("id") == "tokens" and a["class"] == "tier" for _, a in by_tier.elements)
    outcome = measured[1][2].outcomes[0]
    for tier in (Tier.INT2, Tier.BF16):
        tokens = sum(min(PAGE_SIZE, outcome.tokens - p * PAGE_SIZE) for p, bits in enumerate(outcome.page_tiers) if bits == tier)
        assert tokens > 0
        assert by_tier.count("i", f"t-{tier.name}") == tokens


def test_a_browser_shows_a_tokens_details(report: Path, measured: Any, tmp_path: Path) -> None:
    conversation, results = measured
    position = next(s.start for s in conversation.spans if s.role is Role.TOOL_CALL)
    dom = browse(report, tmp_path / "a", f"#token={position}", "--dump-dom")
    card = dom[dom.index('id="card"') :]
    bits = results[1].outcomes[0].page_tiers[position // PAGE_SIZE]
    share = round(results[1].outcomes[0].page_bytes[bits] / PAGE_SIZE)
    for text in (f"{position} (page {position // PAGE_SIZE})", f"<dd>{conversation.token_ids[position]}</dd>", "tool call",
                 "one turn ago", f"{Tier(bits).name}, {share:,} bytes"):  # fmt: skip
        assert text in card


@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_a_browser_paints_it(report: Path, tmp_path: Path, scheme: int) -> None:
    png = tmp_path / "report.png"
    browse(report, tmp_path / "a", "", f"--screenshot={png}", "--window-size=1240,1700", f"--blink-settings=preferredColorScheme={scheme}")
    pixels = np.asarray(Image.open(png).convert("RGB"))
    assert pixels.shape == (1700, 1240, 3)
    paper = pixels[1000, 2]
    assert (paper.mean() < 60) == (scheme == 0)
    # ink, charts, tags: many colours, and the paper does not fill the page
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 200
    assert 0.05 < (np.abs(pixels.astype(int) - paper).sum(-1) > 30).mean() < 0.9


def test_evicted_pages_and_missing_measures_are_shown(measured: Any) -> None:
    html = render_report(*measured)
    assert 'class="chip t-EVICTED"' in html
    assert figure(float("nan")) == figure(None) == "–"
    assert (figure(0.0), figure(4e-4), figure(0.0123)) == ("0", "4.0e-04", "0.0123")
    with pytest.raises(ValueError, match="at least one setting"):
        render_report(measured[0], [])


def test_chart_labels_keep_apart_and_inside() -> None:
    wanted = [100.0, 101.0, 102.0, 20.0, 199.0, 198.0]
    placed = spread(wanted, 15, 10, 200)
    ordered = sorted(placed)
    assert min(b - a for a, b in itertools.pairwise(ordered)) >= 15 - 1e-9
    assert 10 <= ordered[0] <= ordered[-1] <= 200
    assert np.argsort(placed, kind="stable").tolist() == np.argsort(wanted, kind="stable").tolist()


@pytest.mark.parametrize("top", [0.003, 0.9, 1, 7, 22.3, 99, 136.67, 4096])
def test_ticks_cover_the_values_in_round_steps(top: float) -> None:
    ticks = nice_ticks(top)
    assert ticks[0] == 0
    assert ticks[-2] < top <= ticks[-1] * (1 + 1e-9)
    assert 3 <= len(ticks) <= 6


def test_charts_place_what_they_are_given() -> None:
    chart = line_chart([("a", [(0.0, 0.0), (10.0, 50.0)]), ("b", [(0.0, 0.0), (10.0, 100.0)])], [(5.0, "half")], "{:g}")
    assert chart.series[1].points == ((chart.left, chart.bottom), (chart.right, chart.top))
    assert chart.series[0].points[1][1] == (chart.top + chart.bottom) / 2
    assert chart.x_ticks[0].at == (chart.left + chart.right) / 2
    dots = scatter_chart([("zero", 1.0, 0.0), ("low", 2.0, 0.01), ("high", 4.0, 0.1)])
    assert [s.name for s in dots.series] == ["low", "high"]
    assert dots.series[0].points[0][1] == dots.bottom
    assert dots.series[1].points[0][1] == dots.top
