"""Results and spans as tables for a terminal. Knows nothing of how they came about.

Whatever a user wrote is a Text: as a string, brackets and colons in it would be markup.
"""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvstrata.eval.conversation import Conversation
from kvstrata.eval.report import AGE_NAMES, figure
from kvstrata.eval.results import Result


def results_table(results: Sequence[Result]) -> Table:
    """One row a setting, within 80 columns: real bits, bytes, share of bfloat16, KL, top-1, top-1 in tool calls, facts, seconds."""
    first = results[0]
    needles = any(r.needles for r in results)
    title = Text(f"{first.model}, {first.protocol}, {first.tokens:,} tokens", "table.title")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    # with facts there is no room for the rest in 80 columns
    shown = ["bits", "MiB", "KL", "top-1", "calls", "facts", "log p", "s"]
    shown = shown if needles else ["bits", "MiB", "bf16", "KL", "p95", "top-1", "calls", "s"]
    for name in ("setting", *shown):
        table.add_column(name, justify="left" if name == "setting" else "right", no_wrap=True)
    for r in results:
        stored = sum(o.bytes_in_use for o in r.outcomes)
        share = stored / max(sum(o.bytes_bf16 for o in r.outcomes), 1)
        cells = {"KL": figure(r.kl_mean), "p95": figure(r.kl_p95), "top-1": percent(r.top1), "calls": percent(r.tool_call_top1)}
        cells |= {"facts": f"{r.needle_hits}/{r.needles}", "log p": f"{r.needle_logp:.2f}"}
        cells |= {"bits": f"{r.bits_per_element:.2f}", "MiB": f"{stored / 2**20:.2f}", "bf16": f"{share:.0%}"}
        cells["s"] = f"{r.seconds:.0f}"
        table.add_row(Text(r.label), *(cells[name] for name in shown))
    return table


def compared_table(model: str, protocol: str, rows: Sequence[dict[str, Any]]) -> Table:
    """One row a setting of the comparison (eval/peers/compare.py), within 80 columns but for long names."""
    title = Text(f"{model}, {protocol}", "table.title")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("row", "bits", "held", "KL", "top-1", "calls", "facts", "log p"):
        table.add_column(name, justify="left" if name == "row" else "right", no_wrap=name != "row")
    for before, r in zip((None, *rows), rows, strict=False):
        if before is not None and before["group"] != r["group"]:
            table.add_section()
        calls = float("nan") if r["call_top1"] is None else r["call_top1"]
        log_p = "–" if r["fact_logp"] is None else f"{r['fact_logp']:.2f}"
        cells = (f"{r['bits']:.2f}", f"{r['held']:.2f}", figure(r["kl"]), percent(r["top1"]), percent(calls), r["facts"], log_p)
        table.add_row(Text(r["label"]), *cells)
    return table


def percent(value: float) -> str:
    return "–" if value != value else f"{100 * value:.1f}%"


def spans_table(conversation: Conversation) -> Table:
    """One row a span: tokens, turn, age, role and how its text begins."""
    title = Text(f"{conversation.id}: {len(conversation):,} tokens", "table.title")
    table = Table(title=title, title_justify="left")
    for name in ("tokens", "count", "turn", "age", "role", "text"):
        table.add_column(name, justify="right" if name in ("tokens", "count", "turn") else "left", no_wrap=name != "age")
    current = conversation.spans[-1].turn
    for s in conversation.spans:
        text = conversation.span_text(s).replace("\n", "↵")[:60]
        table.add_row(f"{s.start}–{s.end - 1}", str(s.end - s.start), str(s.turn), AGE_NAMES[s.tag(current).age], s.role, Text(text))
    return table
