"""Frozen dataclasses as what JSON holds, and back: plans, tags, settings, reports. Knows nothing of files or of what values mean."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")


def plain(value: Any) -> Any:
    """What json.dumps takes. A mapping becomes a list of pairs, for its keys need not be strings."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return [[plain(k), plain(v)] for k, v in value.items()]
    if isinstance(value, frozenset):
        return sorted(map(plain, value))
    if isinstance(value, tuple | list):
        return [plain(x) for x in value]
    return value


def parsed(cls: type[T], value: Any) -> T:
    """What `plain` made of a value of class `cls`. Raises ValueError, naming the field, where it is none."""
    return cast(T, _parsed(cls, value, cls.__name__))


def _parsed(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (inner,) = (a for a in args if a is not NoneType)
        return None if value is None else _parsed(inner, value, where)
    if is_dataclass(hint):
        return _dataclass(cast(type, hint), value, where)
    if origin in (tuple, frozenset, dict, Mapping):
        return _container(origin, args, _list(value, where), where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        if value not in [x.value for x in hint]:
            raise ValueError(f"{where} is {value!r}; accepted: {', '.join(str(x.value) for x in hint)}")
        return hint(value)
    if hint is bytes and isinstance(value, str):
        return bytes.fromhex(value)
    # a whole number may stand for a float, and a user's setting the other way round: who takes it checks it
    accepted = (int, float) if hint in (int, float) else (hint,)
    if type(value) not in accepted:
        raise ValueError(f"{where} is {value!r}; accepted: {getattr(hint, '__name__', hint)}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {value!r}; accepted: a list")
    return value


def _dataclass(cls: type, value: Any, where: str) -> Any:
    names = [f.name for f in fields(cls)]
    if not isinstance(value, dict) or sorted(value) != sorted(names):
        given = ", ".join(map(str, value)) if isinstance(value, dict) else repr(value)
        raise ValueError(f"{where} has {given}; accepted: {', '.join(names)}")
    hints = get_type_hints(cls)
    return cls(**{name: _parsed(hints[name], value[name], f"{where}.{name}") for name in names})


def _container(origin: Any, args: tuple[Any, ...], value: list[Any], where: str) -> Any:
    if origin in (dict, Mapping):
        return dict(_container(tuple, args, _list(pair, where), where) for pair in value)
    if origin is frozenset:
        return frozenset(_parsed(args[0], x, where) for x in value)
    if args[-1] is Ellipsis:
        return tuple(_parsed(args[0], x, f"{where}[{i}]") for i, x in enumerate(value))
    if len(value) != len(args):
        raise ValueError(f"{where} has {len(value)} values; accepted: {len(args)}")
    return tuple(_parsed(a, x, where) for a, x in zip(args, value, strict=True))
