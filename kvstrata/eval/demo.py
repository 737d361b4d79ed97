"""The demo: one agent conversation at six settings, a report of every token. Knows nothing of terminals."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.eval.conversation import render
from kvstrata.eval.evaluate import Progress, evaluate
from kvstrata.eval.report import write_report
from kvstrata.eval.results import Result, Setting
from kvstrata.eval.traces import Trace
from kvstrata.types import Tier

SETTINGS = (
    Setting("full", dense_dtype="bfloat16"),
    Setting(tier=Tier.INT4),
    Setting(tier=Tier.INT3),
    Setting(tier=Tier.INT2),
    Setting("strata"),
    Setting("strata", budget_bits=3.5),
)


def example() -> Path:
    """The conversation kept in examples/ of the source tree. Raises FileNotFoundError outside of one."""
    path = Path(__file__).parents[2] / "examples" / "agent.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there (the demo's conversation comes with the source tree); name one with --traces")
    return path


def run_demo(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trace: Trace,
    settings: Sequence[Setting],
    report: Path,
    *,
    name: str,
    progress: Progress,
) -> tuple[Result, ...]:
    """Run the settings on one trace and write the report. Raises ValueError where the conversation cannot run."""
    done = evaluate(model, tokenizer, [trace], settings, name=name, protocol="turns", needles=0, progress=progress)
    if done.errors:
        raise ValueError(done.errors[0])
    write_report(report, render(tokenizer, trace), done.results)
    return done.results
