"""Policies: pure functions from tags, signals and a budget to a plan. One a file; `POLICIES` names them all."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvstrata.config import from_dict
from kvstrata.policy.budget import Budget, BudgetTooSmallError, Signals
from kvstrata.policy.full import Full
from kvstrata.policy.role import ByRole
from kvstrata.policy.triaxial import TriAxial
from kvstrata.policy.uniform import Uniform
from kvstrata.policy.window import Window
from kvstrata.types import Plan, Span


class Policy(Protocol):
    """A frozen dataclass of settings. `plan` covers all pages of the sequence, and is pure."""

    @property
    def name(self) -> str: ...

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan: ...


POLICIES: dict[str, type[Policy]] = {"full": Full, "uniform": Uniform, "window": Window, "role": ByRole, "triaxial": TriAxial}


def make_policy(name: str, **settings: Any) -> Policy:
    """Policy of a name, with its settings. Raises ValueError, naming the accepted ones, for an unknown name, setting or value."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; accepted: {', '.join(POLICIES)}")
    return from_dict(POLICIES[name], settings)


__all__ = ["POLICIES", "Budget", "BudgetTooSmallError", "Plan", "Policy", "Signals", "make_policy"]
