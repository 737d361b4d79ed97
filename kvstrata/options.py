"""Options that several commands have, and the setting that they name. Imports torch and the rest inside functions."""

import contextlib
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvstrata.eval.results import Setting

Model = Annotated[str, typer.Option(help="Folder, hub id, or smollm2, qwen05, qwen15.")]
Policy = Annotated[str, typer.Option(help="Which tier each page gets: full, uniform, window, role, triaxial, hyquant, strata.")]
TierName = Annotated[str | None, typer.Option(help="Tier of policies that take one: INT2, INT3, INT4, INT8, BF16.")]
Budget = Annotated[float | None, typer.Option(help="Real bits per KV element, everything counted; instead of --tier.")]
Codec = Annotated[str, typer.Option(help="planes, or a paper's layout: kivi, triaxial, hyquant, hyquant-fp, fp8, int8.")]
Window = Annotated[int | None, typer.Option(help="Tokens of the recent window's aligned group, kept at BF16; default: the policy's.")]
DenseType = Annotated[str | None, typer.Option(help="What BF16 pages hold: bfloat16, float16, float32.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE: a further setting of the policy, such as profile=profile.json; may be repeated."),
]
Traces = Annotated[
    str,
    typer.Option(
        help="JSONL of {messages, tools}, bfcl:multi_turn_base[:N], bfcl:memory:student[:N], research:student[:TOKENS], recall[:TURNS]."
    ),
]


Quality = Annotated[
    float | None,
    typer.Option(help="Predicted KL, nats a token, to stay under at the fewest bytes; policy strata; instead of --budget-bits."),
]


def make_setting(
    policy: str,
    tier: str | None,
    budget_bits: float | None,
    codec: str,
    window: int | None,
    dense_dtype: str | None,
    settings: list[str] | None = None,
    quality: float | None = None,
) -> "Setting":
    """A setting, its names checked. Raises ValueError naming the accepted ones."""
    from kvstrata.eval.results import Setting
    from kvstrata.ops.codecs import CODECS, make_codec
    from kvstrata.policy import POLICIES, make_policy
    from kvstrata.types import Tier

    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; accepted: {', '.join(POLICIES)}")
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}; accepted: {', '.join(CODECS)}")
    parsed = None
    if tier is not None:
        accepted = {t: t.name for t in (*make_codec(codec).tiers, Tier.BF16)}
        with contextlib.suppress(ValueError):
            parsed = Tier.parse(tier)
        if parsed not in accepted:
            raise ValueError(f"codec {codec!r} has no tier {tier!r}; accepted: {', '.join(accepted.values())}")
        make_policy(policy, tier=parsed)
    options = dict(map(named_value, settings or ()))
    make_policy(policy, **options)
    return Setting(policy, parsed, budget_bits, codec, window, dense_dtype, tuple(options.items()), quality)


def named_value(text: str) -> tuple[str, Any]:
    """NAME=VALUE, VALUE as JSON where it is JSON."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ValueError(f"--set {text!r} is no NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
