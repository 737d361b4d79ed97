"""Calibration on a tiny model: deterministic, resumable, and honest about what it cannot measure."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstrata.adapters.capture import captured
from kvstrata.calibrate import run
from kvstrata.calibrate.run import Sample, calibrate, measure
from kvstrata.policy import Signals, make_policy
from kvstrata.policy.profile import Profile, load_profile
from kvstrata.types import Role, Span
from tests.models import VOCAB, tiny


def sample(name: str, seed: int, inst: int = 200) -> Sample:
    ids = torch.randint(3, VOCAB, (inst + 200,), generator=torch.Generator().manual_seed(seed)).tolist()
    at = inst
    spans = [Span(0, at, Role.INST, 0)]
    for turn, role, n in ((1, Role.USER, 20), (1, Role.TOOL_CALL, 30), (1, Role.OBS, 100), (2, Role.USER, 20), (2, Role.ASSISTANT, 30)):
        spans.append(Span(at, at + n, role, turn))
        at += n
    return Sample(name, ids, tuple(spans))


SAMPLES = [sample("a", 1), sample("b", 2), sample("c", 3, inst=230)]


def table(path: Path) -> dict[str, object]:
    data = json.loads(path.read_text())
    data["made"].pop("seconds")
    return data


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_capture_sees_keys_as_the_cache_has_them_and_leaves_the_model_alone(family: str) -> None:
    model = tiny(family)
    ids = torch.tensor([SAMPLES[0].token_ids[:90]])
    plain = model(ids, use_cache=True)
    seen: dict[int, tuple[torch.Tensor, ...]] = {}
    with captured(model, lambda layer, q, k, v, scale: seen.update({layer: (q, k, v, torch.tensor(scale))})):
        again = model(ids, use_cache=True)
    torch.testing.assert_close(again.logits, plain.logits)
    full = [layer for layer in plain.past_key_values.layers if not layer.is_sliding]
    assert sorted(seen) == list(range(len(full)))
    for i, layer in enumerate(full):
        torch.testing.assert_close(seen[i][1], layer.keys[0])
        torch.testing.assert_close(seen[i][2], layer.values[0])
        assert seen[i][0].shape == (4, 90, 64)
    torch.testing.assert_close(model(ids).logits, plain.logits)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen2")
    whole = calibrate(model, "tiny", SAMPLES, tmp_path / "whole.json", seed=5)
    measured: list[str] = []

    def counted(model: object, s: Sample, *args: object) -> object:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(s.id)
        return measure(model, s, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "measure", counted)
    out = tmp_path / "profile.json"
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, "tiny", SAMPLES, out, seed=5)
    assert not out.exists()
    assert measured == ["a", "b"]
    measured.clear()
    calibrate(model, "tiny", SAMPLES, out, seed=5)
    assert measured == ["c"]
    assert table(out) == table(tmp_path / "whole.json")
    assert Profile.from_json(out.read_text()).made["conversations"] == ["a", "b", "c"]
    assert set(whole.made) == {"model", "codec", "seed", "window", "conversations", "data", "seconds", "versions"}


def test_parts_of_another_seed_or_window_are_not_reused(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    calibrate(tiny("qwen2"), "tiny", SAMPLES[:1], out, seed=0)
    first = table(out)
    calibrate(tiny("qwen2"), "tiny", SAMPLES[:1], out, seed=1)
    assert table(out)["tags"] != first["tags"]
    calibrate(tiny("qwen2"), "tiny", SAMPLES[:1], out, seed=0)
    assert table(out) == first
    calibrate(tiny("qwen2"), "tiny", SAMPLES[:1], out, seed=0, window=64)
    assert table(out)["tags"] != first["tags"]


@pytest.mark.parametrize("codec", ["planes", "triaxial", "kivi"])
def test_a_profile_serves_the_policy(tmp_path: Path, codec: str) -> None:
    out = tmp_path / "p.json"
    profile = calibrate(tiny("llama"), "tiny", SAMPLES, out, codec=codec)
    assert profile.bits == ((0, 2, 3, 4, 8) if codec == "planes" else (0, 2, 4))
    used = profile.tokens > 0
    assert (profile.loss["relative"][used, 1] > profile.loss["relative"][used, -1]).all()
    load_profile.cache_clear()
    plan = make_policy("triaxial", profile=str(out)).plan(SAMPLES[0].spans, 400, Signals(2))
    assert len(plan.tiers) == 13


def test_nothing_long_enough_is_an_error_that_says_so(tmp_path: Path) -> None:
    short = Sample("s", list(range(3, 63)), (Span(0, 60, Role.USER, 1),))
    with pytest.raises(ValueError, match="no conversation is long enough"):
        calibrate(tiny("llama"), "tiny", [short], tmp_path / "p.json")
    # the long ones are measured all the same
    assert calibrate(tiny("llama"), "tiny", [short, SAMPLES[0]], tmp_path / "p.json").made["conversations"] == ["a"]


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    """A tuned checkpoint under the same name is measured anew."""
    model, out = tiny("qwen2"), tmp_path / "profile.json"
    first = calibrate(model, "model", SAMPLES[:1], out)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    second = calibrate(model, "model", SAMPLES[:1], out)
    assert not np.allclose(first.loss["mse"], second.loss["mse"])


def test_altered_parts_are_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    calibrate(tiny("qwen2"), "model", SAMPLES[:1], out)
    beside = tmp_path / "profile.parts.json"
    data = json.loads(beside.read_text())
    data["parts"] = {key: {"tokens": [1]} for key in data["parts"]}
    beside.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="was altered"):
        calibrate(tiny("qwen2"), "model", SAMPLES[:1], out)


@pytest.mark.parametrize("garbage", ["{", "[1]", '{"key": "other"}', "[" * 100000, "\x00"])
def test_parts_that_are_none_are_measured_anew(tmp_path: Path, garbage: str) -> None:
    out = tmp_path / "profile.json"
    first = calibrate(tiny("llama"), "model", SAMPLES[:1], out)
    (tmp_path / "profile.parts.json").write_bytes(garbage.encode() if garbage != "\x00" else b"\xff\xfe")
    np.testing.assert_array_equal(calibrate(tiny("llama"), "model", SAMPLES[:1], out).loss["mse"], first.loss["mse"])
    # of the right key, but without parts
    data = json.loads((tmp_path / "profile.parts.json").read_text())
    (tmp_path / "profile.parts.json").write_text(json.dumps({"key": data["key"], "parts": [1]}))
    np.testing.assert_array_equal(calibrate(tiny("llama"), "model", SAMPLES[:1], out).loss["mse"], first.loss["mse"])


def test_what_cannot_be_measured_is_refused_before_anything_is(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="window is 33; it must be 0 or a multiple of the page size, 32"):
        calibrate(model, "model", SAMPLES[:1], tmp_path / "p.json", window=33)
    model.config.max_position_embeddings = 300
    with pytest.raises(ValueError, match="trace a: 400 tokens, but the model takes 300"):
        calibrate(model, "model", SAMPLES[:1], tmp_path / "p.json")
    assert not list(tmp_path.iterdir())
