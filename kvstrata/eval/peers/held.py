"""Bytes that a peer holds, measured from its tensors. Knows nothing of which peer they belong to."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

PARTS = (list, tuple, set)


def held_bytes(things: Iterable[Any], dtype: torch.dtype) -> int:
    """Bytes of all tensors and arrays in `things`, each storage once.

    dtype: the model's. What a peer holds in it, because that is what it was given, counts as 16 bits: a peer is not charged for a model
    that is run in float32. Other types count at their own size, and a view counts as what it shows.
    """
    total, seen = 0, set()
    for x in leaves(things):
        if id(x) not in seen:
            seen.add(id(x))
            size = x.itemsize
            total += (x.size if isinstance(x, np.ndarray) else x.numel()) * (min(size, 2) if x.dtype == dtype else size)
    return total


def leaves(x: Any) -> Iterator[Any]:
    """Plain tensors and arrays inside of containers, tensor subclasses and objects."""
    if isinstance(x, np.ndarray):
        yield x
    elif isinstance(x, Tensor):
        if hasattr(x, "__tensor_flatten__"):
            names, _ = x.__tensor_flatten__()
            for name in names:
                yield from leaves(getattr(x, name))
        else:
            yield x
    elif isinstance(x, dict):
        for value in x.values():
            yield from leaves(value)
    elif isinstance(x, PARTS):
        for value in x:
            yield from leaves(value)
    elif hasattr(x, "__dict__"):
        yield from leaves(vars(x))
