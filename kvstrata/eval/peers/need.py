"""Packages that peers come in: imported where they are wanted, and named where they are missing."""

import importlib
from typing import Any

REQUIREMENTS = {
    "optimum.quanto": "optimum-quanto==0.2.7",
    "hqq.core.quantize": "hqq==0.2.8.post1",
    "kvpress": "kvpress==0.5.5",
    "tiny_turboquant": "tiny-turboquant==0.18.0",
    "turboquant_pro": "turboquant-pro==1.9.1",
}
"""The releases that the adapters were written against, by module."""


class MissingPeerError(ValueError):
    """A peer's package is not installed, or does not import."""


def need(module: str) -> Any:
    """The module. Raises MissingPeerError with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPeerError(
            f"{REQUIREMENTS[module]} is needed and cannot be imported ({error}); docs/peers.md says how to install it"
        ) from error
