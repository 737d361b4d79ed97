"""The rehearsal goes where steps go: every op, at every tier."""

import pytest
import torch

from kvstrata.adapters.vllm import attention
from kvstrata.adapters.vllm.rehearsal import rehearse
from kvstrata.adapters.vllm.settings import EngineSettings
from kvstrata.types import Tier

from .steps import HEADS, KV_HEADS, Engine


@pytest.mark.parametrize("window", [0, 64])
def test_every_op_runs_at_every_tier_that_requests_can_have(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineSettings(policy="uniform", window=window))
    seen: set[tuple[str, Tier | None]] = set()
    for name, tier_at in (("write_pages", 4), ("settle_pages", 3), ("write_dense", None), ("decode", None), ("extend", None)):
        real = getattr(attention, name)

        def watched(*args: object, name: str = name, tier_at: int | None = tier_at, real: object = real, **kwargs: object) -> object:
            tier = None if tier_at is None else args[tier_at]
            assert tier is None or isinstance(tier, Tier)
            seen.add((name, tier))
            assert callable(real)
            return real(*args, **kwargs)

        monkeypatch.setattr(attention, name, watched)
    rehearse(engine.layer, engine.tables, HEADS, KV_HEADS, engine.arena.shape[2], torch.bfloat16, None)
    planes = [t for t in engine.tables.frames if t is not Tier.BF16]
    assert len(planes) == 4
    assert seen == {(op, t) for op in ("write_pages", "settle_pages") for t in planes} | {
        (op, None) for op in ("write_dense", "decode", "extend")
    }
    assert not len(engine.tables)
