"""Settings x conversations -> results: the reference runs once a conversation, every setting is compared with it.

A conversation that cannot run is reported by name and the others go on. Knows nothing of files or terminals.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.eval.conversation import ask, render
from kvstrata.eval.needles import Needle, facts, judge, plant
from kvstrata.eval.protocols import Outcome, Reference, Task, make_task, run_reference, run_session
from kvstrata.eval.replay import replayed
from kvstrata.eval.results import Result, Setting, summarize
from kvstrata.eval.traces import Trace, at_end
from kvstrata.session import Session

SLACK = 64
"""Tokens of room beyond the conversation."""
Progress = Callable[[str, int, int], None]
"""Called with what runs now, the steps done and all steps."""


@dataclass(frozen=True)
class Evaluation:
    """results: one a setting, in order. errors: one line for each conversation that did not run."""

    results: tuple[Result, ...]
    errors: tuple[str, ...]


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    traces: Sequence[Trace],
    settings: Sequence[Setting],
    *,
    name: str,
    protocol: str = "turns",
    needles: int = 5,
    progress: Progress = lambda what, done, total: None,
) -> Evaluation:
    """Run every setting on every trace.

    needles: facts planted in a second pass over each trace that brings no questions of its own; 0 for none.
    Raises ValueError, before anything runs, for a setting that no session takes.
    """
    for setting in settings:
        Session(model, tokenizer, capacity_tokens=SLACK, **setting.session_arguments())
    outcomes: list[list[Outcome]] = [[] for _ in settings]
    found: list[list[Needle]] = [[] for _ in settings]
    errors: list[str] = []
    total = len(traces) * (1 + len(settings))
    for i, trace in enumerate(traces):
        done = i * (1 + len(settings))
        progress(f"{trace.id}: reference", done, total)
        try:
            task, second = _tasks(tokenizer, trace, protocol, needles)
            check_length(model, task, second)
            reference = run_reference(model, task)
            ran: list[tuple[Outcome, list[Needle]]] = []
            for j, setting in enumerate(settings):
                progress(f"{trace.id}: {setting.label}", done + 1 + j, total)
                outcome = run(model, tokenizer, setting, task, reference)
                if second is not None:
                    facts_outcome = run(model, tokenizer, setting, second, None)
                    ran.append((outcome, judge(second.asked, facts_outcome.scores, second.context)))
                else:
                    ran.append((outcome, judge(task.asked, outcome.scores, task.context)))
        except (ValueError, RuntimeError) as error:  # RuntimeError: out of frames, out of memory
            errors.append(str(error) if trace.id in str(error) else f"trace {trace.id}: {error}")
            continue
        # only now: every setting is judged on the same conversations
        for j, (outcome, needles_found) in enumerate(ran):
            outcomes[j].append(outcome)
            found[j] += needles_found
    progress("done", total, total)
    results = [summarize(name, s, protocol, o, f) for s, o, f in zip(settings, outcomes, found, strict=True)]
    return Evaluation(tuple(results), tuple(errors))


def _tasks(tokenizer: PreTrainedTokenizerBase, trace: Trace, protocol: str, needles: int) -> tuple[Task, Task | None]:
    """What is scored, and the pass with planted facts where the trace asks nothing itself."""
    if trace.questions:
        questions = at_end(trace.questions) if protocol == "oneshot" else trace.questions
        return make_task(protocol, *ask(tokenizer, trace, questions)), None
    task = make_task(protocol, render(tokenizer, trace))
    return task, make_task(protocol, *plant(tokenizer, trace, facts(needles))) if needles else None


def check_length(model: PreTrainedModel, *tasks: Task | None) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    for task in tasks:
        if task is not None and limit is not None and len(task.conversation) > limit:
            raise ValueError(f"trace {task.conversation.id}: {len(task.conversation)} tokens, but the model takes {limit}")


def run(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, setting: Setting, task: Task, reference: Reference | None) -> Outcome:
    """One setting on one conversation, in a store of its own."""
    capacity = len(task.conversation) + SLACK
    session = Session(model, tokenizer, capacity_tokens=capacity, chunk_tokens=task.chunk_tokens(), **setting.session_arguments())
    with session, replayed(model, reference.prefill if reference is not None else None):
        return replace(run_session(session, task, reference), dense_dtype=session.store.config.dense_dtype)
