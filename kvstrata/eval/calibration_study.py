"""How many conversations a calibration needs, and what else a profile depends on: its table, the plans made of it, and their KL.

python -m kvstrata.eval.calibration_study --out docs/results/calibration [--counts 5,10,20] [--also NAME=PROFILE] [--only NAMES]
calibrates on the first 5, 10, ... conversations of a source (2.5, 5 and 10% of bfcl:multi_turn_base) and compares each profile with
the last. What was measured lies in --work, so an interrupted study goes on, and one that asks for more measures only those. Knows
nothing of how losses are measured.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.adapters.hf import store_config
from kvstrata.calibrate.run import calibrate, samples
from kvstrata.eval import study as study_file
from kvstrata.eval.conversation import Conversation, render
from kvstrata.eval.evaluate import run
from kvstrata.eval.models import Device, load
from kvstrata.eval.protocols import make_task, run_reference
from kvstrata.eval.results import Setting
from kvstrata.eval.study import record
from kvstrata.eval.traces import Trace, load_traces
from kvstrata.policy import Budget, Signals, make_policy
from kvstrata.policy.profile import AXES, SHAPE, Profile, load_profile
from kvstrata.policy.tags import MODALITIES, ROLES, page_tags
from kvstrata.store.layout import Layout
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Age, Tier

BITS = 3.0
TIERS = (Tier.INT2, Tier.INT3, Tier.INT4)


@dataclass(frozen=True)
class Candidate:
    """A profile that is compared. label: how many conversations it saw, or a given name; path: file or shipped name."""

    label: str
    path: str


def table_change(profile: Profile, last: Profile) -> dict[str, Any]:
    """Loss of a token at INT2 against the last profile's, over the tags that both have seen, each scaled to the same mean. factor: e to the
    rms of the log ratio; correlation: of log losses."""
    both = np.flatnonzero((profile.tokens > 0) & (last.tokens > 0))
    logs = []
    for p in (profile, last):
        loss = p.per_token(AXES)[both, p.bits.index(2)]
        logs.append(np.log(loss / np.average(loss, weights=last.tokens[both])))
    return {"tags": len(both), "factor": float(np.exp(np.sqrt(np.mean((logs[0] - logs[1]) ** 2)))),
            "correlation": float(np.corrcoef(*logs)[0, 1]) if len(both) > 1 else 1.0}  # fmt: skip


def plan_tiers(layout: Layout, conversation: Conversation, path: str) -> list[Tier]:
    """Tiers of a conversation's pages at its end, at BITS real bits, as if planned for the first time."""
    n, spans = len(conversation), conversation.spans
    budget = Budget(layout.tier_bytes(), n, layout.elements(PAGE_SIZE), bits=BITS)
    return list(make_policy("triaxial", profile=path, tiers=TIERS).plan(spans, n, Signals(spans[-1].turn), budget).tiers)


def plan_change(conversation: Conversation, tiers: Sequence[Tier], last: Sequence[Tier]) -> dict[str, Any]:
    """moved: pages with another tier than in the last plan. tags: tokens, mean tier here and there of each tag."""
    counts = page_tags(conversation.spans, len(conversation))
    tags = []
    for code in np.flatnonzero(counts.sum(0)):
        age, modality, role = np.unravel_index(code, SHAPE)
        name = f"{Age(int(age)).name.lower()} {MODALITIES[modality].value} {ROLES[role].value}"
        here, there = (float(np.average(np.array(t, float), weights=counts[:, code])) for t in (tiers, last))
        tags.append({"tag": name, "tokens": int(counts[:, code].sum()), "tier": here, "last": there})
    return {"pages": len(tiers), "moved": sum(a is not b for a, b in zip(tiers, last, strict=True)), "tags": tags}


def compare(layout: Layout, conversations: Sequence[Conversation], candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Each candidate beside the last one."""
    last = load_profile(candidates[-1].path)
    lasts = [plan_tiers(layout, c, candidates[-1].path) for c in conversations]
    out = []
    for candidate in candidates:
        profile = load_profile(candidate.path)
        plans = [
            {"trace": c.id, **plan_change(c, plan_tiers(layout, c, candidate.path), tiers)}
            for c, tiers in zip(conversations, lasts, strict=True)
        ]
        # profiles of before windows were named left one of 64 out; a joined one has no conversations of its own
        made = {"conversations": len(profile.made.get("conversations", ())), "window": profile.made.get("window", 64)}
        out.append({"label": candidate.label, **made, **table_change(profile, last), "plans": plans})
    return out


def measured(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, traces: Sequence[Trace], counts: Sequence[int], work: Path
) -> list[Candidate]:
    """Profiles of the first conversations, as many as `counts` says. Raises ValueError where there are not so many."""
    read, failed = samples(lambda trace: render(tokenizer, trace), traces)
    if failed or len(read) < max(counts):
        raise ValueError(f"{len(read)} conversations can be read; {max(counts)} are needed. {' '.join(failed)}".strip())
    out = []
    for count in counts:
        calibrate(model, name, read[:count], work / "profile.json", progress=lambda what, done, total: print(what, done, total, flush=True))
        path = work / f"profile-{count}.json"
        shutil.copyfile(work / "profile.json", path)
        out.append(Candidate(str(count), str(path)))
    return out


def judge(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trace: Trace,
    candidates: Sequence[Candidate],
    data: dict[str, Any],
    out: Path,
) -> None:
    """KL of each candidate on one conversation, those that OUT.json has not yet."""
    done = {r["label"] for r in data["runs"] if r["trace"] == trace.id}
    missing = [c for c in candidates if c.label not in done]
    if not missing:
        return
    task = make_task("turns", render(tokenizer, trace))
    reference = run_reference(model, task)
    for c in missing:
        setting = Setting("triaxial", budget_bits=BITS, options=(("profile", c.path), ("tiers", TIERS)))
        data["runs"].append(record("calibration", c.label, task, run(model, tokenizer, setting, task, reference)))
        save(data, out)


def save(data: dict[str, Any], out: Path) -> None:
    study_file.save(data, out, lambda r: (r["trace"], r["label"]), markdown)


def markdown(data: dict[str, Any]) -> str:
    runs: dict[str, list[dict[str, Any]]] = {}
    for r in data["runs"]:
        runs.setdefault(r["label"], []).append(r)
    kl = {label: study_file.pooled(mine) for label, mine in runs.items()}
    return study_file.render("calibration.md.j2", model=data["model"], source=data["source"], rows=data["profiles"], kl=kl, bits=BITS)


def main(
    out: Annotated[Path, typer.Option(help="Results without an ending: OUT.json and OUT.md are written.")],
    model: str = "qwen05",
    source: Annotated[str, typer.Option(help="Conversations to calibrate on and to judge.")] = "bfcl:multi_turn_base",
    skip: Annotated[int, typer.Option(help="Conversations to leave out first; the judged ones must be among them.")] = 10,
    counts: Annotated[str, typer.Option(help="Conversations of each profile, ascending.")] = "5,10,20",
    judged: Annotated[str, typer.Option(help="Numbers of the conversations that plans and KL are of.")] = "0,2",
    also: Annotated[list[str] | None, typer.Option(help="NAME=PROFILE, to compare with the others.")] = None,
    only: Annotated[str, typer.Option(help="Profiles whose plans are run, by name, separated by commas; all by default, - for none.")] = "",
    work: Annotated[Path, typer.Option(help="Folder of the profiles and of what each conversation gave.")] = Path("out/calibration"),
    device: Device = "cpu",
) -> None:
    """Compare profiles of few and many conversations."""
    wanted, places = ([int(x) for x in text.split(",")] for text in (counts, judged))
    if wanted != sorted(set(wanted)) or wanted[0] < 1 or not 0 <= max(places) < skip:
        raise typer.BadParameter(f"counts {counts} must ascend from 1 or more, and judged {judged} be below skip, {skip}")
    traces = load_traces(source, skip + max(wanted)).traces
    loaded, tokenizer = load(model, device=device)
    work.mkdir(parents=True, exist_ok=True)
    name = Path(model).name
    if any("=" not in item for item in also or []):
        raise typer.BadParameter(f"also {also}; accepted: NAME=PROFILE")
    extra = [Candidate(*item.split("=", 1)) for item in also or []]
    candidates = [*extra, *measured(loaded, tokenizer, name, traces[skip:], wanted, work)]
    layout = Store(store_config(loaded, PAGE_SIZE)).layout
    conversations = [render(tokenizer, traces[i]) for i in places]
    data = {"model": name, "source": source, "profiles": compare(layout, conversations, candidates), "runs": []}
    save(data, out)
    chosen = [c for c in candidates if not only or c.label in only.split(",")]
    for i in places:
        judge(loaded, tokenizer, traces[i], chosen, data, out)


if __name__ == "__main__":
    typer.run(main)
