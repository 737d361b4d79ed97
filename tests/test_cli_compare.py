"""`kvstrata eval --compare` and `kvstrata report`: what they print and write, what they refuse. Models are tiny."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from kvstrata import cli, cli_compare
from tests.eval.fakes import MESSAGES, TOOL, tiny_model

LINE = json.dumps({"id": "good", "messages": MESSAGES, "tools": [TOOL]})


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, model_path: Callable[[str], Path]) -> Callable[..., Any]:
    tokenizer = AutoTokenizer.from_pretrained(model_path("smollm2"))
    for module in (cli, cli_compare):
        monkeypatch.setattr(module, "load_model", lambda name, device="cpu": (tiny_model(), tokenizer))
    monkeypatch.setattr(cli.err, "width", 200)
    return lambda *arguments: CliRunner().invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.jsonl"
    path.write_text(f"{LINE}\n")
    return path


def test_compare_prints_a_row_each_and_writes_what_report_reads(invoke: Any, good: Path, tmp_path: Path) -> None:
    out = tmp_path / "compared.json"
    arguments = ("--model", "tiny", "--traces", good, "--tier", "INT4", "--protocol", "oneshot", "--needles", "1")
    result = invoke("eval", *arguments, "--compare", "--groups", "formats", "--json", out)
    assert result.exit_code == 0, result.output
    for label in ("yours: uniform INT4", "NVFP4", "INT4 by token", "FP8", "INT8 by token"):
        assert label in result.stdout
    data = json.loads(out.read_text())
    by_label = {r["label"]: r for r in data["runs"]}
    assert by_label["INT8 by token"]["bits"] == pytest.approx(8.5)
    assert by_label["INT8 by token"]["kl"] < by_label["NVFP4"]["kl"]
    page = tmp_path / "page.html"
    result = invoke("report", "--results", out, "--out", page)
    assert result.exit_code == 0, result.output
    assert "INT8 by token" in page.read_text()
    assert 'id="map"' not in page.read_text()


def test_report_of_a_conversation(invoke: Any, good: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = invoke("report", "--model", "tiny", "--traces", good, "--policy", "uniform", "--tier", "INT3", "--out", page)
    assert result.exit_code == 0, result.output
    assert 'id="map"' in page.read_text()
    assert "uniform INT3" in page.read_text()


def test_a_conversation_that_cannot_be_compared_is_named(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text(f"{LINE}\n{json.dumps({'id': 'short', 'messages': [{'role': 'user', 'content': 'A' * 40000}]})}\n")
    arguments = ("--model", "tiny", "--traces", path, "--protocol", "oneshot", "--needles", "0", "--compare", "--groups", "formats")
    result = invoke("eval", *arguments, "--json", "-")
    assert result.exit_code == 1
    assert "short" in result.stderr
    assert {r["trace"] for r in json.loads(result.stdout)["runs"]} == {"good"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("eval", "--model", "t", "--traces", "GOOD", "--compare", "--groups", "planets"),
            "unknown group 'planets'; accepted: all, or of ours",
        ),
        (("report",), "there is nothing to report; give --results, or --model and --traces"),
        (("report", "--model", "t"), "a conversation needs both --model and --traces"),
        (("report", "--results", "GOOD"), "holds no runs of a model"),
        (("report", "--results", "nowhere.json"), "nowhere.json"),
        (("report", "--results", "GOOD", "--out", "."), "--out '.' cannot be written"),
        (("report", "--model", "t", "--traces", "GOOD", "--policy", "wishful"), "unknown policy 'wishful'"),
    ],
)
def test_wrong_usage_is_one_clear_line_and_exit_code_2(
    invoke: Any, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*(good if a == "GOOD" else a for a in arguments))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "compare.html").exists()
