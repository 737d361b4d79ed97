"""The residual head: nothing before training, files that say what they are, features that are finite."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvstrata.ops.residual import HEADS, NUM_FEATURES, NUM_RECEIVED, HeadConfig, ResidualHead, at_rest, features, load_head, shipped
from kvstrata.ops.rotary import moved

CONFIG = HeadConfig(2, 6, 2, 64, rank=8)


def inputs(n: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    keys, asks = torch.randn(n, 2, 64, generator=g) * 30, torch.randn(7, 2, 64, generator=g)
    rule = torch.rand(2, n, generator=g)
    rule[:, :3] = 0
    age, role = torch.arange(n) % 4, torch.arange(n) % 7
    own = torch.randn(n, CONFIG.channels, generator=g)
    return features(rule, torch.randn(2, n, generator=g), keys, age, role), own, keys, asks


def answer(head: ResidualHead, layer: int, known: torch.Tensor, own: torch.Tensor, keys: torch.Tensor, asks: torch.Tensor) -> torch.Tensor:
    return head(layer, known, head.worth(layer, own), keys, asks)


@pytest.mark.parametrize("n", [1, 2, 50])
def test_features_are_finite_and_as_many_as_said(n: int) -> None:
    known = inputs(n)[0]
    assert known.shape == (2, n, NUM_FEATURES)
    assert known.isfinite().all()
    assert known.abs().max() < 20


@pytest.mark.parametrize("n", [1, 2, 50])
def test_what_a_token_received_is_seen_by_the_step_and_as_the_mean_where_unknown(n: int) -> None:
    rule, keys, age = torch.rand(2, n), torch.randn(n, 2, 64), torch.zeros(n, dtype=torch.int64)
    received = torch.rand(2, n) * torch.arange(n, 0, -1)
    received[0, 0] = 0
    known = features(rule, rule, keys, age, age, received)
    assert known.shape == (2, n, NUM_FEATURES + NUM_RECEIVED)
    assert known.isfinite().all()
    assert torch.equal(known[..., :NUM_FEATURES], features(rule, rule, keys, age, age))
    paid = torch.log10(received / torch.arange(n, 0, -1))
    assert (known[1, :, -2] * 2 - 4 - paid[1]).abs().max() < 1e-5
    if n > 1:
        assert abs(known[0, 0, -2] * 2 - 4 - paid[0, 1:].mean()) < 1e-5
    for looks in (False, True):
        head = ResidualHead(HeadConfig(1, 6, 2, 64, received=looks))
        torch.nn.init.ones_(head.straight)
        worth, asks = torch.zeros(2, n), keys[:1]
        out, blind = (
            head(0, x, worth, keys, asks) for x in (known, torch.cat([known[..., :NUM_FEATURES], known[..., NUM_FEATURES:] + 1], -1))
        )
        assert torch.equal(out, blind) is not looks


def test_a_token_is_seen_as_if_it_stood_nowhere() -> None:
    g, inv_freq = torch.Generator().manual_seed(1), 10000 ** -(torch.arange(32) / 32)
    q, k, v = (torch.randn(5, h, 64, generator=g) for h in (6, 2, 2))
    plain = at_rest(q, k, v, torch.zeros(5), inv_freq)
    assert plain.shape == (5, CONFIG.channels)
    where = torch.tensor([3.0, 900.0, 17.0, 0.0, 4096.0])
    turned = at_rest(moved(q, where, inv_freq), moved(k, where, inv_freq), v, where, inv_freq)
    assert (turned - plain).abs().max() < 2e-3
    assert torch.equal(at_rest(q, k, v, where, None), torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], -1))


def test_a_new_head_changes_nothing_and_a_trained_one_does() -> None:
    head, (known, own, keys, asks) = ResidualHead(CONFIG), inputs()
    assert torch.equal(answer(head, 1, known, own, keys, asks), torch.zeros(2, 50))
    with torch.no_grad():
        head.outer.fill_(1.0)
    out = answer(head, 1, known, own, keys, asks)
    assert out.std() > 0
    assert not torch.equal(out, answer(head, 0, known, own, keys, asks)), "layers are alike"
    assert not torch.allclose(out, answer(head, 1, known, own, keys, asks.roll(1, -1))), "the current query is not seen"
    assert not torch.allclose(out, answer(head, 1, known, own.roll(1, -1), keys, asks)), "the token itself is not seen"
    blind = ResidualHead(replace(CONFIG, rank=0))
    with torch.no_grad():
        blind.outer.fill_(1.0)
    told = [answer(blind, 1, known, own, keys, a) for a in (asks, asks.roll(1, -1))]
    assert torch.equal(*told)
    assert told[0].std() > 0


def test_files_come_back_and_strangers_are_refused(tmp_path: Path) -> None:
    head, (known, own, keys, asks) = ResidualHead(CONFIG), inputs()
    with torch.no_grad():
        head.outer.fill_(0.5)
        head.mean.fill_(0.25)
    path = tmp_path / "head.safetensors"
    head.save(path, model="tiny")
    assert torch.allclose(answer(load_head(str(path)), 0, known, own, keys, asks), answer(head, 0, known, own, keys, asks), atol=1e-2)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="is no residual head"):
        load_head(str(path))
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="config"):
        load_head(str(path))
    with torch.no_grad():
        head.outer.fill_(float("nan"))
    head.save(path)
    with pytest.raises(ValueError, match="not finite"):
        load_head(str(path))
    with pytest.raises(ValueError, match="no_such_file"):
        load_head(str(tmp_path / "no_such_file"))


def test_shipped_heads_load_and_were_judged_on_what_they_had_not_read() -> None:
    assert "qwen05" in shipped()
    for name in shipped():
        head, report = load_head(name), json.loads((HEADS / f"{name}.json").read_text())
        assert head.outer.any()
        assert (HEADS / f"{name}.safetensors").stat().st_size < 4 << 20
        people = [{c.split("_")[1] for c in report[part]} for part in ("learned_from", "stopped_by", "judged_by")]
        assert not (people[0] | people[1]) & people[2]
        kept = report["mass_kept"]
        assert all(kept["rule + residual"][share] > kept["rule"][share] for share in kept["rule"])


@pytest.mark.parametrize("bad", [{"num_layers": 0}, {"rank": 2.5}, {"hidden": True}])
def test_bad_sizes_are_refused_by_name(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        HeadConfig(**{"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64} | bad)
