"""One row of the comparison on one conversation, rows of several conversations together, and what is said of them.

Knows nothing of files, and nothing of how a peer stores.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.eval.conversation import ask, render
from kvstrata.eval.evaluate import SLACK, check_length
from kvstrata.eval.needles import facts, judge, plant
from kvstrata.eval.peers.need import MissingPeerError
from kvstrata.eval.peers.rows import BITS, GROUPS, OURS, Row
from kvstrata.eval.peers.session import PeerSession
from kvstrata.eval.protocols import Outcome, Reference, Task, make_task, run_reference, run_session
from kvstrata.eval.replay import replayed
from kvstrata.eval.results import Setting
from kvstrata.eval.study import pooled, record
from kvstrata.eval.traces import Trace, at_end
from kvstrata.ops.score import NUM_QUERIES
from kvstrata.session import Session

TIMES = {2.6: 4.0, 3.0: 4.0, 3.5: 4.0, 4.5: 3.0, 5.4: 1.0, 8.0: 1.0}
"""How many times lower than the best peer's our KL is to be, by bits."""
ROOM = 1.02
"""Share of the bits compared at by which a peer's may exceed them."""
NEAR = 0.85
"""Share of the bits compared at that one of ours must take at least: what takes far fewer is no answer to what is done with them."""


def tasks(tokenizer: PreTrainedTokenizerBase, trace: Trace, protocol: str, needles: int) -> tuple[Task, Task | None]:
    """What KL is measured on, and what facts are asked of: the trace's own questions, or planted ones."""
    if trace.questions:
        questions = at_end(trace.questions) if protocol == "oneshot" else trace.questions
        return make_task(protocol, *ask(tokenizer, trace, questions)), None
    planted = make_task(protocol, *plant(tokenizer, trace, facts(needles))) if needles else None
    return make_task(protocol, render(tokenizer, trace)), planted


def run_row(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: Row, protocol: str, task: Task, reference: Reference
) -> tuple[Outcome, Any]:
    """One row on one task: what it lost, and the report of what is counted: oneshot, the prefix that the scored tokens attend; turns, the
    whole context."""
    at = 0 if protocol == "oneshot" else sum(end <= task.context for end in task.chunks) - 1
    if isinstance(row.how, Setting):
        capacity = len(task.conversation) + SLACK
        session = Session(model, tokenizer, capacity_tokens=capacity, chunk_tokens=task.chunk_tokens(), **row.how.session_arguments())
        with session, replayed(model, reference.prefill):
            outcome = run_session(session, task, reference)
            return outcome, session.reports[at]
    with PeerSession(model, row.how, protocol, reference.prefill) as peer:
        return run_session(peer, task, reference), peer.reports[at]


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: Row, protocol: str, prepared: Sequence[tuple[Task, Reference]]
) -> dict[str, Any]:
    """One row on one conversation as JSON. bits: of what is stored; held: with the queries that a policy keeps to choose by."""
    started = time.perf_counter()
    (task, reference), *more = prepared
    outcome, prefix = run_row(model, tokenizer, row, protocol, task, reference)
    run = record(row.group, row.label, task, outcome)
    for second, known in more:
        scores = run_row(model, tokenizer, row, protocol, second, known)[0].scores
        found = judge(second.asked, scores, second.context)
        run |= {"fact_logp": [f.log_p for f in found], "facts_hit": sum(f.hit for f in found)}
    held = 16 * prefix.bytes_stored / prefix.bytes_bf16
    run |= {
        "protocol": protocol, "family": row.family, "end_bits": run["bits"], "bits": prefix.bits_per_element, "held": held,
        "held_bytes": prefix.bytes_stored, "masked": row.masked, "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    return run


def pool(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(r["tokens"] for r in runs)
    held = sum(r["held"] * r["tokens"] for r in runs) / tokens
    return pooled(runs) | {"group": runs[0]["group"], "family": runs[0]["family"], "masked": runs[0]["masked"], "held": held}


def pools(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row each, on the conversations that most rows ran on alone: means over others are no neighbours of theirs."""
    by_label: dict[str, list[dict[str, Any]]] = {}
    for r in runs:
        by_label.setdefault(r["label"], []).append(r)
    most = max((len(of) for of in by_label.values()), default=0)
    order = {group: i for i, group in enumerate(GROUPS)}
    rows = [
        pool(of) | {"label": label if len(of) == most else f"{label} ({len(of)} of {most} conversations)"} for label, of in by_label.items()
    ]
    return sorted(rows, key=lambda r: order[r["group"]])


def verdicts(rows: Sequence[dict[str, Any]], bits: str) -> list[str]:
    """At each number of bits: ours and the best peer that takes no more. bits: which are compared, "bits" or "held"."""
    lines = []
    for at in BITS:
        mine = [r for r in rows if r["family"] == OURS and r[bits] <= at * ROOM]
        theirs = [r for r in rows if r["group"] != "ours" and r[bits] <= at * ROOM]
        if not mine or not theirs or max(r[bits] for r in mine) < NEAR * at:
            continue
        ours, best = (min(x, key=lambda r: r["kl"]) for x in (mine, theirs))
        ratio = best["kl"] / ours["kl"] if ours["kl"] else math.inf
        line = f"{at:g} bits: KL {ours['kl']:.4f} ({ours['label']}), best peer {best['kl']:.4f} ({best['label']}): "
        line += f"{ratio:.1f} times lower, {TIMES[at]:g} wanted: {_word(ratio >= TIMES[at])}"
        lines.append(line)
        for key, name in (("call_top1", "tool-call top-1"), ("fact_logp", "facts' log p")):
            known = [r for r in theirs if r[key] is not None]
            if known and ours[key] is not None:
                top = max(known, key=lambda r: r[key])
                lines.append(
                    f"{at:g} bits: {name} {ours[key]:.3f}, best peer {top[key]:.3f} ({top['label']}): {_word(ours[key] >= top[key])}"
                )
    return lines


def _word(met: bool) -> str:
    return "met" if met else "MISSED"


def not_run(data: dict[str, Any]) -> dict[str, str]:
    """Families whose package was missing, and why; not those that another process, or a later run, has had after all."""
    ran = {r["family"] for r in data["runs"]}
    return {family: why for family, why in data.get("missing", {}).items() if family not in ran}


def compared(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trace: Trace, source: str, rows: Sequence[Row], protocol: str, needles: int
) -> Iterator[tuple[Row, dict[str, Any] | MissingPeerError | str]]:
    """Rows on one conversation, one after another: what was measured, a package that is missing, or what went wrong.

    Raises ValueError for a conversation that the model, or the protocol, does not take.
    """
    prepared = []
    for task in tasks(tokenizer, trace, protocol, needles):
        if task is not None:
            check_length(model, task)
            # what is evicted may be chosen by queries that are older than those that planes are chosen by
            prepared.append((task, run_reference(model, task, max(NUM_QUERIES, len(task.conversation)))))
    for row in rows:
        try:
            yield row, measure(model, tokenizer, row, protocol, prepared) | {"source": source}
        except MissingPeerError as error:
            yield row, error
        except (ValueError, RuntimeError) as error:  # RuntimeError: out of frames, out of memory
            yield row, f"{trace.id} {row.label}: {error}"
