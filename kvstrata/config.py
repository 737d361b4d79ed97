"""Frozen configuration, checked when it is made. Knows nothing of how its values are used."""

from dataclasses import MISSING, dataclass, fields
from typing import Any, Self, TypeVar

from kvstrata.types import PAGE_SIZE

T = TypeVar("T")


def from_dict(cls: type[T], values: dict[str, Any]) -> T:
    """A config of class `cls`; an unknown key raises ValueError with the accepted ones."""
    accepted = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    unknown = [key for key in values if key not in accepted]
    if unknown:
        raise ValueError(f"unknown {cls.__name__} key {unknown[0]!r}; accepted: {', '.join(accepted)}")
    missing = [f.name for f in fields(cls) if f.name not in values and f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{cls.__name__} lacks {', '.join(missing)}")
    return cls(**values)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Geometry of a store.

    num_frames: frames of the arena, frame 0 (the dead slot) included.
    dense_dtype: what a BF16 page holds: "bfloat16", "float16" or, for a float32 model that must lose nothing, "float32".
    window: tokens of the recent window's aligned group; a multiple of the page size, or 0 for no window.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_frames: int
    codec: str = "planes"
    dense_dtype: str = "bfloat16"
    window: int = 64

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "num_frames", "window"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a whole number")
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_frames < 2:
            raise ValueError(f"num_frames is {self.num_frames}; it must be at least 2, for frame 0 is never handed out")
        if self.window < 0 or self.window % PAGE_SIZE:
            raise ValueError(f"window is {self.window}; it must be 0 or a multiple of the page size, {PAGE_SIZE}")
        if self.dense_dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"unknown dense_dtype {self.dense_dtype!r}; accepted: bfloat16, float16, float32")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return from_dict(cls, values)
