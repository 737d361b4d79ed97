"""Settings as an engine's config and a client's request give them: what is accepted, and what is refused by name."""

import math
from dataclasses import fields
from typing import Any

import pytest

from kvstrata.adapters.vllm.settings import EngineSettings, request_settings
from kvstrata.types import Tier


def test_defaults() -> None:
    s = EngineSettings.from_dict({"budget_bits": 3})
    assert (s.policy, s.budget_bits, s.tier, s.window, s.group) == ("triaxial", 3.0, None, 0, 32)
    assert EngineSettings.from_dict({"policy": "uniform"}).tier is Tier.INT4
    assert EngineSettings.from_dict({"policy": "uniform", "tier": "int3"}).tier is Tier.INT3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 3}, "unknown EngineSettings key 'bits'; accepted: policy, tier"),
        ({}, "policy 'triaxial' needs budget_bits"),
        ([], "kvstrata is \\[\\]; accepted: a mapping"),
        ({"policy": "best"}, "policy is 'best'; accepted: uniform, triaxial"),
        ({"policy": "uniform", "tier": "INT5"}, "tier: unknown tier 'INT5'; accepted: INT2, INT3, INT4, INT8"),
        ({"policy": "uniform", "tier": "BF16"}, "tier is BF16; accepted: INT2, INT3, INT4, INT8"),
        ({"policy": "uniform", "tier": 4, "budget_bits": 3.0}, "both given"),
        ({"budget_bits": "3"}, "budget_bits is '3'"),
        ({"budget_bits": True}, "budget_bits is True"),
        ({"budget_bits": float("nan")}, "budget_bits is nan"),
        ({"budget_bits": 3, "window": 48}, "window is 48; accepted: 0 to 4096, in steps of 32"),
        ({"budget_bits": 3, "window": 64.0}, "window is 64.0"),
        ({"budget_bits": 3, "sinks": -1}, "sinks is -1"),
        ({"budget_bits": 3, "sinks": True}, "sinks is True"),
        ({"budget_bits": 3, "tiers": "INT2"}, "tiers is 'INT2'"),
        ({"budget_bits": 3, "tiers": ["BF16"]}, "tiers is"),
        ({"budget_bits": 3, "horizon": 0}, "horizon is 0"),
        ({"budget_bits": 3, "profile": "nowhere.json"}, "no profile 'nowhere.json'"),
        ({"budget_bits": 3, "ageing": True}, "ageing is True; accepted: INT2, INT3, INT4, INT8"),
        ({"budget_bits": 3, "ageing": "BF16"}, "ageing is BF16; accepted: INT2, INT3, INT4, INT8"),
        ({"budget_bits": 3, "ageing": "INT8"}, "ageing is INT8; accepted: a tier below the highest of tiers: INT2, INT3, INT4"),
        ({"budget_bits": 3, "tiers": ["INT2", "INT8"], "ageing": "INT4"}, "ageing is INT4; .* of tiers: INT2"),
        ({"budget_bits": 3, "tiers": ["INT2"], "ageing": "INT2"}, "none, for there is one tier"),
        ({"policy": "uniform", "tier": "INT3", "ageing": "INT3"}, "ageing is INT3; accepted: a tier below that of the pages, INT3"),
        ({"policy": "uniform", "ageing": "INT2", "profile": "nowhere.json"}, "no profile 'nowhere.json'"),
        ({"budget_bits": 3, "dense_dtype": "int8"}, "dense_dtype is 'int8'; accepted: bfloat16, float16, float32"),
    ],
)
def test_what_is_not_accepted_is_refused_by_name(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings.from_dict(values)


HOSTILE = [
    None, True, -1, 10**400, -(10**400), 10**5000, -(10**5000), 1e308, math.nan, math.inf, "x" * 100_000, "a\x00b", "\ud800", "a\nb", "٣",
    [], [None], [["INT2"]], ["x" * 100_000], ["INT2", 1e5], {"INT2": 1}, object(),
]  # fmt: skip
NULLABLE = ("budget_bits", "tier", "ageing", "dense_dtype", "chat_template")


@pytest.mark.parametrize("name", [f.name for f in fields(EngineSettings)])
@pytest.mark.parametrize("base", [{"policy": "uniform"}, {"policy": "uniform", "budget_bits": 3.0}, {"budget_bits": 3.0, "ageing": "INT2"}])
def test_any_value_of_any_setting_is_taken_or_refused_in_a_line(name: str, base: dict[str, Any]) -> None:
    for value in HOSTILE:
        # texts that nothing reads under these settings
        unread = name == "chat_template" or (name == "profile" and "ageing" not in base)
        if (value is None and name in NULLABLE) or (isinstance(value, str) and unread):
            continue
        with pytest.raises(ValueError, match=f"{name}|budget_bits") as caught:
            EngineSettings.from_dict({**base, name: value})
        message = str(caught.value)
        assert "\n" not in message and "accepted: " in message and (len(message) < 400 or name == "profile"), message[:400]


@pytest.mark.parametrize("name", ["kvstrata_budget_bits", "kvstrata_tier"])
@pytest.mark.parametrize("server", [EngineSettings(budget_bits=3.0), EngineSettings(policy="uniform", tier=Tier.INT4)])
def test_any_value_of_an_extra_argument_is_refused_in_a_line(name: str, server: EngineSettings) -> None:
    for value in HOSTILE[1:]:
        with pytest.raises(ValueError, match=r"budget_bits|tier") as caught:
            request_settings(server, {name: value})
        assert "\n" not in str(caught.value) and "accepted: " in str(caught.value) and len(str(caught.value)) < 300


def test_a_request_asks_for_less() -> None:
    server = EngineSettings(budget_bits=3.5)
    assert request_settings(server, None) is server
    assert request_settings(server, {"other": object()}) is server
    assert request_settings(server, {"kvstrata_budget_bits": 3}).budget_bits == 3.0
    tiered = EngineSettings(policy="uniform", tier=Tier.INT4)
    assert request_settings(tiered, {"kvstrata_tier": "INT2"}).tier is Tier.INT2
    # a request may have nothing that it could give up
    ageing = EngineSettings.from_dict({"policy": "uniform", "tier": "INT4", "ageing": "int3"})
    assert ageing.ageing is Tier.INT3 and request_settings(ageing, {"kvstrata_tier": "INT2"}).tier is Tier.INT2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kvstrata_bits": 3}, "unknown extra argument 'kvstrata_bits'; accepted: kvstrata_budget_bits, kvstrata_tier"),
        ({"kvstrata_budget_bits": 4}, "budget_bits is 4; accepted: at most the server's, 3.5"),
        ({"kvstrata_budget_bits": "three"}, "budget_bits is 'three'"),
        ({"kvstrata_budget_bits": [3.0]}, "budget_bits is"),
        ({"kvstrata_budget_bits": "9" * 10_000_000}, "budget_bits is '999"),
        ({"kvstrata_budget_bits": -1}, "budget_bits is -1"),
        ({"kvstrata_tier": "INT2"}, "this server runs under a budget; accepted: budget_bits"),
        ({"kvstrata_budget_bits": 3.0, "kvstrata_tier": "BF16"}, "budget_bits and tier are both given; accepted: one of them"),
        ({"kvstrata" + "x" * 10_000_000: 1}, "unknown extra argument 'kvstrataxxx"),
    ],
)
def test_a_request_is_refused_in_a_line(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        request_settings(EngineSettings(budget_bits=3.5), extra)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("tier", ["INT8", "BF16", "x" * 100_000, ["INT2"], 4.0, None, True])
def test_a_tier_above_the_servers_or_none_at_all(tier: Any) -> None:
    server = EngineSettings(policy="uniform", tier=Tier.INT4)
    if tier is None:
        assert request_settings(server, {"kvstrata_tier": None}) is server
        return
    with pytest.raises(ValueError, match="tier") as caught:
        request_settings(server, {"kvstrata_tier": tier})
    assert len(str(caught.value)) < 300
