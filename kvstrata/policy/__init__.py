"""Policies: pure functions from tags, signals and a budget to a plan. One a file; `POLICIES` names them all."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol

from kvstrata.policy.budget import Budget, BudgetTooSmallError, Signals
from kvstrata.policy.full import Full
from kvstrata.policy.hyquant import HyQuant
from kvstrata.policy.role import ByRole
from kvstrata.policy.strata import Strata
from kvstrata.policy.thinned import H2O, Chance, IntentKV, Recent, SnapKV, Streaming, Thinned
from kvstrata.policy.triaxial import TriAxial
from kvstrata.policy.uniform import Uniform
from kvstrata.policy.window import Window
from kvstrata.types import Plan, Span


class Policy(Protocol):
    """A frozen dataclass of settings. `plan` covers all pages of the sequence, and is pure."""

    @property
    def name(self) -> str: ...

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan: ...


POLICIES: dict[str, type[Full | Uniform | Window | ByRole | TriAxial | HyQuant | Thinned | Strata]] = {
    "full": Full,
    "uniform": Uniform,
    "window": Window,
    "role": ByRole,
    "triaxial": TriAxial,
    "hyquant": HyQuant,
    "intentkv": IntentKV,
    "streaming": Streaming,
    "snapkv": SnapKV,
    "h2o": H2O,
    "recent": Recent,
    "random": Chance,
    "strata": Strata,
}


def recent_window(name: str) -> int:
    """Tokens of the aligned group of the recent window that a policy wants where its user says nothing: 64, or the policy's own WINDOW."""
    return int(getattr(POLICIES.get(name), "WINDOW", 64))


def make_policy(name: str, **settings: Any) -> Policy:
    """Policy of a name, with its settings. Raises ValueError, naming the accepted ones, for an unknown name, setting or value."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; accepted: {', '.join(POLICIES)}")
    accepted = [f.name for f in fields(POLICIES[name])]
    unknown = [key for key in settings if key not in accepted]
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r} of policy {name!r}; accepted: {', '.join(accepted) or 'none'}")
    try:
        return POLICIES[name](**settings)
    except TypeError as error:
        # a value of another type, which the policy could not even compare
        given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        raise ValueError(f"policy {name!r} does not take {given}: {error}") from error


__all__ = ["POLICIES", "Budget", "BudgetTooSmallError", "Plan", "Policy", "Signals", "make_policy", "recent_window"]
