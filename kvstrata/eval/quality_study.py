"""What KL a loss means: plans of policy strata at several budgets, their losses and their KL, and one law fitted to both.

python -m kvstrata.eval.quality_study --out docs/results/quality [--model qwen05] [--teach 4,7,9,12] [--judge 0,2,20] [--write PROFILE.json]
The conversations of --teach make the law; those of --judge are predicted by it, at other budgets and to given KLs. Writes OUT.json after
each run and OUT.md from it; runs that OUT.json holds are not made again. --write puts the law into a profile. Protocol "oneshot".
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvstrata.eval import study as study_file
from kvstrata.eval.conversation import render
from kvstrata.eval.evaluate import SLACK
from kvstrata.eval.models import Device, load
from kvstrata.eval.protocols import Reference, Task, make_task, run_reference, run_session
from kvstrata.eval.replay import replayed
from kvstrata.eval.results import Setting
from kvstrata.eval.study import record
from kvstrata.eval.traces import load_traces
from kvstrata.policy.profile import Law, Profile, load_profile
from kvstrata.session import Session

SOURCE = "bfcl:multi_turn_base"
TEACH, JUDGE = "4,7,9,12", "0,2,20"
TAUGHT, JUDGED = (2.7, 3.0, 3.5, 4.2, 6.0), (2.8, 3.25, 3.8, 5.0)
"""Budgets in real bits."""
ASKED = (0.003, 0.01, 0.03)
"""KLs that plans are made for."""
FLOORS = np.linspace(0, 0.95, 20)
"""Shares of the least KL that the law's floor may be."""


def fitted(losses: Sequence[float], kls: Sequence[float]) -> Law:
    """The law of least squares in log KL. Raises ValueError for fewer than three runs, or where more loss does not mean more KL."""
    x, y = np.array(losses), np.array(kls)
    if len(x) < 3 or x.min() <= 0 or y.min() <= 0:
        raise ValueError(f"{len(x)} runs with losses from {min(losses, default=0):g} say no law; needed: three, of losses above 0")
    best: tuple[float, Law] | None = None
    for floor in FLOORS * y.min():
        # a straight line of logarithms, each run weighed by how much of its KL the floor leaves
        power, scale = np.polyfit(np.log(x), np.log(y - floor), 1, w=(y - floor) / y)
        if power <= 0:
            continue
        law = Law(float(floor), float(np.exp(scale)), float(power), float(x.min()), float(x.max()))
        error = float(np.square([np.log(law.kl(a) / b) for a, b in zip(x, y, strict=True)]).sum())
        if best is None or error < best[0]:
            best = error, law
    if best is None:
        raise ValueError("more loss did not mean more KL in these runs; no law is fitted")
    return best[1]


def run(model: Any, tokenizer: Any, setting: Setting, task: Task, reference: Reference, part: str) -> dict[str, Any]:
    """One run as JSON, with the loss of the plan that the scored tokens attended."""
    capacity = len(task.conversation) + SLACK
    session = Session(model, tokenizer, capacity_tokens=capacity, chunk_tokens=task.chunk_tokens(), **setting.session_arguments())
    with session, replayed(model, reference.prefill):
        outcome = run_session(session, task, reference)
        return record(part, setting.label, task, outcome) | {"loss": session.reports[0].plan_loss, "asked": setting.quality}


def law_of(runs: Sequence[dict[str, Any]]) -> Law | None:
    taught = [r for r in runs if r["group"] == "teach"]
    return fitted([r["loss"] for r in taught], [r["kl"] for r in taught]) if len(taught) > 2 else None


def markdown(data: dict[str, Any]) -> str:
    law, rows = law_of(data["runs"]), []
    for r in data["runs"]:
        predicted = None if law is None else law.kl(r["loss"])
        rows.append(r | {"predicted": predicted, "ratio": None if predicted is None else predicted / r["kl"]})
    judged = [r for r in rows if r["group"] == "judge" and r["ratio"]]
    lines = []
    if judged:
        lines.append(f"{sum(0.5 <= r['ratio'] <= 2 for r in judged)} of {len(judged)} runs on held-out conversations within 2 times")
    for label in dict.fromkeys(r["label"] for r in judged):
        of = [r for r in judged if r["label"] == label]
        mean, measured = (float(np.mean([r[name] for r in of])) for name in ("predicted", "kl"))
        lines.append(
            f"{label}, mean of {len(of)} conversations: predicted {mean:.4f}, measured {measured:.4f}, ratio {mean / measured:.2f}"
        )
    if asked := [r for r in judged if r["asked"]]:
        lines.append(f"{sum(r['kl'] <= r['asked'] for r in asked)} of {len(asked)} plans to a given KL measured under it")
    return study_file.render("quality.md.j2", model=data["model"], profile=data["profile"], law=law, lines=lines, rows=rows)


def main(
    out: Annotated[Path, typer.Option(help="Results without an ending: OUT.json and OUT.md are written.")],
    model: str = "qwen05",
    profile: Annotated[str, typer.Option(help="Whose losses are to mean a KL.")] = "qwen05",
    teach: Annotated[str, typer.Option(help=f"Conversations of {SOURCE} that make the law.")] = TEACH,
    judge: Annotated[str, typer.Option(help="Those that are predicted by it.")] = JUDGE,
    write: Annotated[Path | None, typer.Option(help="A profile that the law is put into.")] = None,
    device: Device = "cpu",
) -> None:
    path = out.with_suffix(".json")
    data: dict[str, Any] = {"model": Path(model).name, "profile": profile, "runs": []}
    if path.exists():
        data = json.loads(path.read_text(encoding="utf-8"))
    loaded, tokenizer = load(model, device=device)
    parts = {"teach": [int(x) for x in teach.split(",")], "judge": [int(x) for x in judge.split(",") if x]}
    traces = load_traces(SOURCE, max(itertools.chain(*parts.values())) + 1).traces
    for part, places in parts.items():
        for place in places:
            budgets = TAUGHT if part == "teach" else JUDGED
            wanted = [Setting("strata", budget_bits=b, options=(("profile", profile),)) for b in budgets]
            law = law_of(data["runs"])
            if part == "judge" and law is not None:
                lawful = out.with_suffix(".profile.json")
                lawful.write_text(dataclasses.replace(load_profile(profile), law=law).to_json(), encoding="utf-8")
                wanted += [Setting("strata", quality=q, options=(("profile", str(lawful)),)) for q in ASKED]
            done = {(r["label"], r["trace"]) for r in data["runs"]}
            missing = [s for s in wanted if (s.label, traces[place].id) not in done]
            if not missing:
                continue
            task = make_task("oneshot", render(tokenizer, traces[place]))
            reference = run_reference(loaded, task)
            for setting in missing:
                last = run(loaded, tokenizer, setting, task, reference, part)
                data["runs"].append(last)
                study_file.save(data, out, lambda r: (r["trace"], r["label"]), markdown)
                print(f"{last['trace']} {setting.label}: {last['bits']:.2f} bits, loss {last['loss']:.3g}, KL {last['kl']:.4f}", flush=True)
    law = law_of(data["runs"])
    if write is not None and law is not None:
        old = Profile.from_json(write.read_text(encoding="utf-8"))
        write.write_text(dataclasses.replace(old, law=law).to_json(), encoding="utf-8")
    print(law)


if __name__ == "__main__":
    typer.run(main)
