"""What studies of many settings share: one run as JSON, runs of a row together, a file that interrupted and parallel runs add to.

Knows nothing of which settings a study has.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvstrata.eval.needles import judge
from kvstrata.eval.protocols import Outcome, Task


def record(group: str, label: str, task: Task, outcome: Outcome) -> dict[str, Any]:
    """One run as JSON. KL in nats, means over tokens; bits real, at the context's end."""
    scores, calls = outcome.scores, outcome.scores.tool_calls
    facts = judge(task.asked, scores, task.context)
    return {
        "group": group, "label": label, "trace": task.conversation.id, "tokens": outcome.tokens,
        "bits": outcome.bits_per_element, "bytes": outcome.bytes_in_use, "scored": len(scores.kl), "kl": float(scores.kl_mean),
        "kl_p95": float(scores.kl_p95), "top1": float(scores.top1), "call_tokens": len(calls.kl), "call_kl": _number(calls.kl_mean),
        "call_top1": _number(calls.top1), "fact_logp": [f.log_p for f in facts], "facts_hit": sum(f.hit for f in facts),
        "pages": dict(sorted(Counter(outcome.page_tiers).items())), "anchors": outcome.anchors, "seconds": round(outcome.seconds, 1),
    }  # fmt: skip


def _number(x: float) -> float | None:
    return None if x != x else float(x)


def pooled(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs of one row on several conversations: means over tokens."""
    scored, calls = sum(r["scored"] for r in runs), sum(r["call_tokens"] for r in runs)
    facts, hits = [x for r in runs for x in r["fact_logp"]], sum(r["facts_hit"] for r in runs)

    def mean(key: str, weight: str, total: int) -> float | None:
        return sum((r[key] or 0.0) * r[weight] for r in runs) / total if total else None

    return {
        "label": runs[0]["label"], "runs": len(runs), "bits": mean("bits", "tokens", sum(r["tokens"] for r in runs)),
        "kl": mean("kl", "scored", scored), "top1": mean("top1", "scored", scored), "call_kl": mean("call_kl", "call_tokens", calls),
        "call_top1": mean("call_top1", "call_tokens", calls), "facts": f"{hits}/{len(facts)}" if facts else "-",
        "fact_logp": sum(facts) / len(facts) if facts else None,
    }  # fmt: skip


def render(template: str, **values: Any) -> str:
    """A template of eval/templates, filled in."""
    environment = Environment(
        loader=PackageLoader("kvstrata.eval"), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template(template).render(**values)


def begun(out: Path, **fresh: Any) -> dict[str, Any]:
    """What OUT.json holds already, or `fresh` where there is none."""
    path = out.with_suffix(".json")
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else fresh


def save(
    data: dict[str, Any], out: Path, key: Callable[[dict[str, Any]], Hashable], markdown: Callable[[dict[str, Any]], str]
) -> None:  # fmt: skip
    """OUT.json and OUT.md, whole or not at all, with what another process has added since: runs whose `key` is not here, and other
    entries that are empty here."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(out.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if out.with_suffix(".json").exists():
            there = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
            known = {key(r) for r in data["runs"]}
            data["runs"] += [r for r in there["runs"] if key(r) not in known]
            data |= {name: value for name, value in there.items() if not data.get(name)}
        for suffix, text in ((".json", json.dumps(data, indent=1) + "\n"), (".md", markdown(data))):
            new = out.with_suffix(suffix + ".new")
            new.write_text(text, encoding="utf-8")
            new.replace(out.with_suffix(suffix))
    finally:
        os.close(folder)
