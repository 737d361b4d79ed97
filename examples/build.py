"""Write the demo's conversation: one of bfcl-eval's, run through its Python back ends, with a part of its tool schemas.

python examples/build.py [--id multi_turn_long_context_2] [--tools 10] [--out examples/agent.jsonl]
"""

from dataclasses import replace
from pathlib import Path

import typer

from kvstrata.eval import bfcl, traces


def pick(trace: traces.Trace, count: int) -> traces.Trace:
    """The trace with `count` of its tools, in their order: those that it calls, then the first of the others."""
    called = {call["function"]["name"] for message in trace.messages for call in message.get("tool_calls", ())}
    spare = [t["function"]["name"] for t in trace.tools if t["function"]["name"] not in called]
    kept = called | set(spare[: max(count - len(called), 0)])
    return replace(trace, tools=[t for t in trace.tools if t["function"]["name"] in kept])


OUT = Path(__file__).with_name("agent.jsonl")


def main(id: str = "multi_turn_long_context_2", tools: int = 10, out: Path = OUT) -> None:
    category = id.rpartition("_")[0]
    found = next((t for t in bfcl.multi_turn(category) if t.id == id), None)
    if found is None:
        raise typer.BadParameter(f"no conversation {id!r} in {category}")
    out.write_text(traces.to_json(pick(found, tools)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
