import math
from typing import Any

import pytest
from rich.console import Console

from kvstrata.eval.results import Result
from kvstrata.eval.table import results_table


def result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "model": "m", "policy": "uniform", "tier": None, "codec": "planes", "budget_bits": 3.25, "protocol": "turns", "dense_dtype": None,
        "tokens": 12345, "bits_per_element": 16.75, "bytes_per_token": 1e4, "peak_bytes": 1, "kl_mean": 1.234e-5, "kl_p95": 0.1234,
        "top1": 1.0, "nll_delta": 0.0, "tool_call_top1": 1.0, "tool_call_kl": 0.0, "needle_hits": 12, "needles": 12, "needle_logp": -12.34,
        "reuse": 0.999, "seconds": 1234.0, "label": "uniform 3.25 bits",
    }  # fmt: skip
    return Result(**(values | changes))


@pytest.mark.parametrize("needles", [0, 12])
def test_every_figure_is_readable_in_80_columns(needles: int) -> None:
    console = Console(width=80, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(results_table([result(needles=needles), result(needles=needles, kl_mean=math.nan)]))
    text = capture.get()
    assert "…" not in text
    for shown in ("uniform 3.25 bits", "16.75", "1.2e-05", "100.0%", "1234", "12/12" if needles else "0.1234", "–"):
        assert shown in text
