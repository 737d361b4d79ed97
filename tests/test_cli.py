"""The command line: what it prints, what it refuses and with which exit code. Models are tiny; one test runs `python -m kvstrata`."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from kvstrata import cli
from tests.eval.fakes import MESSAGES, TOOL, tiny_model

ROOT = Path(__file__).parents[1]
LINE = json.dumps({"messages": MESSAGES, "tools": [TOOL]})
KEYS = {
    "model", "policy", "codec", "budget_bits", "tokens", "bits_per_element", "bytes_per_token", "peak_bytes", "kl_mean", "kl_p95", "top1",
    "nll_delta", "tool_call_top1", "needle_hits", "needles", "needle_logp", "reuse", "seconds", "protocol", "dense_dtype", "tool_call_kl",
}  # fmt: skip


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, model_path: Callable[[str], Path]) -> Callable[..., Any]:
    """Run a command with a tiny model; -> result with exit_code, stdout, stderr."""
    tokenizer = AutoTokenizer.from_pretrained(model_path("smollm2"))
    monkeypatch.setattr(cli, "load_model", lambda name, device: (tiny_model(), tokenizer))
    monkeypatch.setattr(cli.err, "width", 200)

    def run(*arguments: object, **kwargs: Any) -> Any:
        return CliRunner().invoke(cli.app, [str(a) for a in arguments], **kwargs)

    return run


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.jsonl"
    path.write_text(f"{LINE}\n")
    return path


def test_eval_writes_the_documented_json(invoke: Any, good: Path, tmp_path: Path) -> None:
    result = invoke("eval", "--model", "tiny", "--traces", good, "--tier", "int3", "--needles", "1", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out.json").read_text())
    assert set(record) >= KEYS
    assert (record["model"], record["policy"], record["tier"], record["protocol"]) == ("tiny", "uniform", "INT3", "turns")
    assert record["needles"] == 1
    assert "uniform INT3" in result.stdout


def test_settings_of_a_policy_reach_it() -> None:
    setting = cli.make_setting("triaxial", None, 3.0, "planes", None, None, ["profile=smollm2", "tiers=[2, 4]", "frozen=true"])
    assert setting.session_arguments()["policy_settings"] == {"profile": "smollm2", "tiers": [2, 4], "frozen": True}


def test_json_on_stdout_is_json_alone(invoke: Any, good: Path) -> None:
    result = invoke(
        "eval", "--model", "tiny", "--traces", good, "--policy", "full", "--protocol", "oneshot", "--needles", "0", "--json", "-"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["kl_mean"] < 1e-5


def test_a_broken_line_is_named_the_rest_runs_and_the_exit_code_says_so(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text(f"{LINE}\n{{broken\n")
    result = invoke("eval", "--model", "tiny", "--traces", path, "--needles", "0", "--json", "-")
    assert result.exit_code == 1
    assert "mixed.jsonl, line 2: " in result.stderr.replace("\n", "")
    assert json.loads(result.stdout)["tokens"] > 0


def test_nothing_readable_is_a_failure(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("{broken\n")
    result = invoke("eval", "--model", "tiny", "--traces", path)
    assert result.exit_code == 1
    assert "line 1" in result.stderr
    assert "no conversation" in result.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--policy", "wishful"], "unknown policy 'wishful'; accepted: full, uniform"),
        (["--codec", "zip"], "unknown codec 'zip'; accepted: planes, kivi"),
        (["--tier", "INT5"], "codec 'planes' has no tier 'INT5'; accepted: INT2, INT3, INT4, INT8, BF16"),
        (["--tier", "EVICTED"], "codec 'planes' has no tier 'EVICTED'; accepted: INT2, INT3, INT4, INT8, BF16"),
        (["--tier", "²"], "codec 'planes' has no tier '²'; accepted: INT2"),
        (["--tier", "[/b]"], "codec 'planes' has no tier '[/b]'; accepted: INT2"),
        (["--tier", "INT3", "--codec", "kivi"], "codec 'kivi' has no tier 'INT3'; accepted: INT2, INT4, BF16"),
        (["--tier", "INT3", "--policy", "full"], "unknown setting 'tier' of policy 'full'; accepted: none"),
        (["--policy", "[red]:smile:"], "unknown policy '[red]:smile:'; accepted: full"),
        (["--codec", "[/]"], "unknown codec '[/]'; accepted: planes"),
        (["--json", "/no/folder/x.json"], "--json '/no/folder/x.json' cannot be written: No such file or directory; accepted: a file"),
        (["--json", "."], "--json '.' cannot be written: Is a directory"),
        (["--json", "x" * 300], "cannot be written: File name too long"),
        (["--traces", "no[/b]"], "traces 'no[/b]': no such file"),
        (["--traces", "x" * 300], "File name too long"),
        (["--traces", "bfcl:multi_turn_base:²"], "'²' in traces 'bfcl:multi_turn_base:²' is not a positive number"),
        (["--tier", "INT3", "--budget-bits", "3"], "exclude each other"),
        (["--budget-bits", "-1"], "budget_bits is -1"),
        (["--budget-bits", "0.5"], "floor"),
        (["--protocol", "twice"], "unknown protocol 'twice'; accepted: turns, oneshot"),
        (["--needles", "99"], "99 needles; accepted: 0 to"),
        (["--window", "33"], "window is 33"),
        (["--dense-dtype", "int4"], "unknown dense_dtype 'int4'"),
        (["--traces", "nowhere.jsonl"], "no such file"),
        (["--traces", "bfcl:nothing"], "unknown traces 'bfcl:nothing'; accepted: bfcl:multi_turn_base"),
        (["--limit", "0"], "limit is 0"),
        (["--set", "sinks"], "--set 'sinks' is no NAME=VALUE"),
        (["--set", "sinks=two"], "sinks is 'two'"),
        (["--set", "sink=1"], "unknown setting 'sink' of policy 'uniform'; accepted: tier, sinks, tiers"),
        (["--policy", "triaxial", "--set", "profile=nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_usage_is_one_clear_line_and_exit_code_2(invoke: Any, good: Path, arguments: list[str], message: str) -> None:
    result = invoke("eval", "--model", "tiny", "--traces", good, "--needles", "0", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command, option", [("demo", "--report"), ("calibrate", "--out")])
def test_an_output_that_cannot_be_written_stops_a_command_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, good: Path, tmp_path: Path, command: str, option: str
) -> None:
    monkeypatch.setattr(cli, "load_model", lambda name, device: pytest.fail("a model was loaded"))
    for path in (tmp_path, good / "inside.json"):
        result = CliRunner().invoke(cli.app, [command, "--model", "tiny", "--traces", str(good), option, str(path)])
        assert result.exit_code == 2, result.output
        assert len(result.stderr.strip().splitlines()) == 1
        assert str(path) in result.stderr or "exists" in result.stderr


def test_the_check_of_an_output_leaves_no_trace(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("kept")
    for path in (new, old, Path("/dev/null")):
        cli.check_output("--json", path)
    assert not new.exists()
    assert old.read_text() == "kept"


MARKUP = "[/red] [b]:smile: \\[/b] [link=x]"


def test_what_users_wrote_is_printed_as_they_wrote_it(invoke: Any, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "brackets.jsonl"
    said = {"id": MARKUP, "messages": [{"role": "user", "content": MARKUP}, *MESSAGES[1:]]}
    path.write_text(f"{json.dumps(said)}\n{json.dumps({'messages': [{'role': '[/red]', 'content': ''}]})}\n")
    result = invoke("eval", "--model", MARKUP.replace("/", ""), "--traces", path, "--needles", "0")
    assert result.exit_code == 1, result.output
    assert "message 0 has role '[/red]'; accepted" in result.stderr
    assert MARKUP.replace("/", "") in result.stdout
    folder = str(model_path("smollm2"))
    table = CliRunner().invoke(cli.app, ["tag", "--model", folder, "--traces", str(path), "--limit", "2"], env={"COLUMNS": "200"})
    assert table.exit_code == 1, table.output
    assert table.stdout.count(MARKUP) == 2  # the title and the user's span
    assert "role '[/red]'" in table.stderr


def test_a_malformed_conversation_does_not_stop_the_others(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    broken = json.dumps({"messages": [MESSAGES[1], {"role": "assistant", "tool_calls": [{"function": {}}]}]})
    path.write_text(f"{broken}\n{LINE}\n")
    for arguments in (["eval", "--needles", "0", "--json", "-"], ["calibrate", "--out", tmp_path / "p.json"]):
        result = invoke(arguments[0], "--model", "tiny", "--traces", path, *arguments[1:])
        assert "calls.jsonl, line 1: " in result.stderr
        assert "has tool call {'function': {}}; a function with a name is needed" in result.stderr
    assert json.loads(invoke("eval", "--model", "t", "--traces", path, "--needles", "0", "--json", "-").stdout)["tokens"] > 0


def test_a_missing_model_is_named(good: Path) -> None:
    result = CliRunner().invoke(cli.app, ["eval", "--model", "./no-such-folder", "--traces", str(good)])
    assert result.exit_code == 2
    assert "no-such-folder" in result.stderr
    assert "Traceback" not in result.output


def test_tag_shows_spans(model_path: Callable[[str], Path], good: Path) -> None:
    folder = str(model_path("smollm2"))
    result = CliRunner().invoke(cli.app, ["tag", "--model", folder, "--traces", str(good), "--json"])
    assert result.exit_code == 0, result.output
    spans = [json.loads(line) for line in result.stdout.splitlines()]
    assert [s["start"] for s in spans[1:]] == [s["end"] for s in spans[:-1]]
    assert {s["role"] for s in spans} == {"inst", "user", "assistant", "tool_call", "obs", "delim"}
    table = CliRunner().invoke(cli.app, ["tag", "--model", folder, "--traces", str(good)])
    assert table.exit_code == 0
    assert "tool_call" in table.stdout
    # in a pipe nothing is cut
    text = spans[1]["text"].replace("\n", "↵")[:60]
    assert len(text) == 60
    assert text in table.stdout
    assert "…" not in table.stdout
    narrow = CliRunner().invoke(cli.app, ["tag", "--model", folder, "--traces", str(good)], env={"COLUMNS": "60"})
    assert max(map(len, narrow.stdout.splitlines())) <= 60


def test_demo_writes_the_report_and_a_row_for_each_setting(invoke: Any, good: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    result = invoke("demo", "--model", "tiny", "--traces", good, "--report", report)
    assert result.exit_code == 0, result.output
    for name in ("full", "uniform INT4", "uniform INT3", "uniform INT2", "strata", "strata 3.5 bits"):
        assert name in result.stdout
    assert report.read_text().startswith("<!doctype html>")


def test_the_demo_conversation_is_a_long_agent_conversation() -> None:
    from kvstrata.eval.demo import example
    from kvstrata.eval.traces import load_traces

    (trace,) = load_traces(str(example())).traces
    roles = [m["role"] for m in trace.messages]
    assert roles.count("user") >= 4
    assert roles.count("tool") == sum(len(m.get("tool_calls", ())) for m in trace.messages) >= 4
    assert sum(len(str(m)) for m in (*trace.messages, *trace.tools)) > 4 * 1500


def test_chat_answers_each_line_until_the_input_ends(invoke: Any) -> None:
    result = invoke("chat", "--model", "tiny", "--tier", "INT4", "--max-new-tokens", "4", input="hello\nand again\n")
    assert result.exit_code == 0, result.output
    reports = [line for line in result.stderr.splitlines() if " bits, " in line]
    assert len(reports) == 2
    # the second turn reuses the first
    assert int(reports[1].split(" reused")[0].split()[-1]) > 0


def test_the_module_runs_and_help_is_light() -> None:
    help_ = subprocess.run([sys.executable, "-m", "kvstrata", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(command in help_.stdout for command in ("demo", "tag", "eval", "chat"))
    code = "import sys, kvstrata.cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    light = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert light.stdout.strip() == "[]"


def test_calibrate_writes_a_profile_that_a_policy_takes(invoke: Any, tmp_path: Path) -> None:
    long = [*MESSAGES[:1], {"role": "user", "content": "A line of the report. " * 40}, *MESSAGES[1:]]
    traces, out = tmp_path / "long.jsonl", tmp_path / "profile.json"
    traces.write_text(json.dumps({"messages": long, "tools": [TOOL]}) + "\n{broken\n")
    result = invoke("calibrate", "--model", "tiny", "--traces", traces, "--out", out)
    assert result.exit_code == 1, result.output  # for the broken line, which is named; the rest ran
    assert "line 2" in result.stderr
    assert "1 conversations" in result.stdout
    assert json.loads(out.read_text())["made"]["model"] == "tiny"
    empty = invoke("calibrate", "--model", "tiny", "--traces", traces, "--out", out, "--skip", "9")
    assert empty.exit_code == 2
    assert "no conversation is long enough" in empty.stderr


def test_train_intent_judges_by_the_traces_that_are_named_and_by_no_others(invoke: Any, tmp_path: Path, monkeypatch: Any) -> None:
    talk = [{"role": role, "content": "Tell me something of the sea. " * 8} for role in ("user", "assistant")] * 3
    for name in ("a", "b"):
        lines = [json.dumps({"id": f"{name}{i}", "messages": talk, "tools": [TOOL]}) for i in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    seen: dict[str, Any] = {}

    def train_on(model: Any, name: str, conversations: Any, out: Path, **kwargs: Any) -> Any:
        seen.update(kwargs, ids=[c.id for c in conversations])
        return {"mass_kept": {}, "judged_by": []}

    monkeypatch.setattr("kvstrata.intent.run.train_on", train_on)
    for limit, skip, wanted in ((2, 0, ["a0", "a1", "b0", "b1"]), (2, 2, ["a2", "a3", "b2", "b3"]), (9, 4, ["a4", "b4"])):
        traces = ("--traces", tmp_path / "a.jsonl", "--judge", tmp_path / "b.jsonl")
        result = invoke("train-intent", "--model", "tiny", *traces, "--limit", limit, "--skip", skip, "--out", tmp_path / "h.safetensors")
        assert result.exit_code == 0, result.output
        assert seen["ids"] == wanted
        assert seen["judges"] == len(wanted) // 2
    # one that nothing can be learned from is named before any work is done, and the others go on
    short = json.dumps({"id": "short", "messages": talk[:4], "tools": [TOOL]})
    (tmp_path / "a.jsonl").write_text("\n".join([short, *(tmp_path / "a.jsonl").read_text().splitlines()]))
    result = invoke("train-intent", "--model", "tiny", "--traces", tmp_path / "a.jsonl", "--out", tmp_path / "h.safetensors")
    assert result.exit_code == 1
    assert "short: a conversation of" in result.stderr and "fewer than three user turns" in result.stderr
    assert seen["ids"] == ["a0", "a1", "a2", "a3", "a4"]
