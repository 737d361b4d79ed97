"""The residual head: nothing before training, files that say what they are, features that are finite."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvstrata.ops.residual import NUM_FEATURES, HeadConfig, ResidualHead, features, load_head

CONFIG = HeadConfig(2, 2, 64)


def inputs(n: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    keys, asks = torch.randn(n, 2, 64, generator=g) * 30, torch.randn(7, 2, 64, generator=g)
    rule, received = torch.rand(2, n, generator=g), torch.rand(2, n, generator=g) * 100
    rule[:, :3] = 0
    age, role = torch.arange(n) % 4, torch.arange(n) % 7
    return features(rule, torch.randn(2, n, generator=g), received, keys, age, role), keys, asks


@pytest.mark.parametrize("n", [1, 2, 50])
def test_features_are_finite_and_as_many_as_said(n: int) -> None:
    known, _, _ = inputs(n)
    assert known.shape == (2, n, NUM_FEATURES)
    assert known.isfinite().all()
    assert known.abs().max() < 20


def test_a_new_head_changes_nothing_and_a_trained_one_does() -> None:
    head, (known, keys, asks) = ResidualHead(CONFIG), inputs()
    assert torch.equal(head(1, known, keys, asks), torch.zeros(2, 50))
    with torch.no_grad():
        head.outer.weight.fill_(1.0)
    out = head(1, known, keys, asks)
    assert out.std() > 0
    assert not torch.equal(out, head(0, known, keys, asks)), "layers are alike"
    assert not torch.allclose(out, head(1, known, keys, asks.roll(1, -1))), "the current query is not seen"


def test_files_come_back_and_strangers_are_refused(tmp_path: Path) -> None:
    head, (known, keys, asks) = ResidualHead(CONFIG), inputs()
    with torch.no_grad():
        head.outer.weight.fill_(0.5)
    path = tmp_path / "head.safetensors"
    head.save(path, model="tiny")
    assert torch.allclose(load_head(str(path))(0, known, keys, asks), head(0, known, keys, asks), atol=1e-2)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="is no residual head"):
        load_head(str(path))
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="config"):
        load_head(str(path))
    with torch.no_grad():
        head.outer.bias.fill_(float("nan"))
    head.save(path)
    with pytest.raises(ValueError, match="not finite"):
        load_head(str(path))
    with pytest.raises(ValueError, match="no_such_file"):
        load_head(str(tmp_path / "no_such_file"))


@pytest.mark.parametrize("bad", [{"num_layers": 0}, {"rank": 2.5}, {"hidden": True}])
def test_bad_sizes_are_refused_by_name(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        HeadConfig(**{"num_layers": 2, "num_kv_heads": 2, "head_dim": 64} | bad)
