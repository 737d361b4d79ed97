"""The law that is fitted, and one small study on a tiny model, interrupted and continued."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from kvstrata.eval import quality_study as study
from kvstrata.eval.traces import Trace
from kvstrata.options import make_setting
from kvstrata.policy.profile import Law, Profile, load_profile
from tests.eval.fakes import MESSAGES, TOOL, tiny_model


@pytest.mark.parametrize("law", [Law(0.0, 600.0, 1.6, 1e-4, 2e-3), Law(0.0005, 2000.0, 1.8, 1e-4, 2e-3)])
def test_a_law_is_found_again(law: Law) -> None:
    losses = np.geomspace(law.low, law.high, 12).tolist()
    found = study.fitted(losses, [law.kl(x) for x in losses])
    assert all(abs(np.log(found.kl(x) / law.kl(x))) < 0.05 for x in losses)
    assert (found.low, found.high) == pytest.approx((law.low, law.high))
    # a KL means one loss, and the other way round
    assert law.loss(law.kl(3e-4)) == pytest.approx(3e-4)
    assert law.loss(law.floor / 2) == 0


def test_noise_stays_within_two_times() -> None:
    random, law = np.random.default_rng(0), Law(0.0003, 700.0, 1.6, 1e-4, 2e-3)
    losses = np.geomspace(1e-4, 2e-3, 20)
    found = study.fitted(losses.tolist(), [law.kl(x) * float(np.exp(random.normal(0, 0.3))) for x in losses])
    assert all(0.5 < found.kl(x) / law.kl(x) < 2 for x in losses)


def test_what_says_no_law_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 runs .* say no law"):
        study.fitted([1e-3, 2e-3], [0.1, 0.2])
    with pytest.raises(ValueError, match="more loss did not mean more KL"):
        study.fitted([1e-3, 2e-3, 3e-3], [0.3, 0.2, 0.1])


def test_an_interrupted_study_goes_on(model_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path("smollm2"))
    told = [
        Trace(name, [*MESSAGES[:1], {"role": "user", "content": "A line of the report. " * 40}, *MESSAGES[1:]], [TOOL]) for name in "ab"
    ]
    monkeypatch.setattr(study, "load", lambda name, device="cpu": (tiny_model(), tokenizer))
    monkeypatch.setattr(study, "load_traces", lambda source, count: type("Loaded", (), {"traces": told}))
    monkeypatch.setattr(study, "fitted", lambda losses, kls: Law(0.0, 1.0, 1.0, 1e-6, 1.0))
    monkeypatch.setattr(study, "TAUGHT", (2.5, 3.0, 4.0))
    monkeypatch.setattr(study, "JUDGED", (3.0,))
    monkeypatch.setattr(study, "ASKED", (0.01,))
    out, profile = tmp_path / "quality", tmp_path / "profile.json"
    profile.write_text(load_profile("default").to_json())
    study.main(out, "tiny", "default", "0", "", None)
    assert [r["group"] for r in json.loads(out.with_suffix(".json").read_text())["runs"]] == ["teach"] * 3
    study.main(out, "tiny", "default", "0", "1", profile)
    runs = json.loads(out.with_suffix(".json").read_text())["runs"]
    assert [(r["group"], r["label"]) for r in runs[3:]] == [("judge", "strata 3 bits"), ("judge", "strata KL 0.01")]
    assert all(r["loss"] >= 0 for r in runs)
    assert Profile.from_json(profile.read_text()).law == Law(0.0, 1.0, 1.0, 1e-6, 1.0)
    assert "runs on held-out conversations" in out.with_suffix(".md").read_text()


def test_a_quality_is_a_setting_of_its_own() -> None:
    setting = make_setting("strata", None, None, "planes", None, None, ["profile=qwen05"], 0.01)
    assert setting.label == "strata KL 0.01"
    assert setting.session_arguments()["quality"] == 0.01
    with pytest.raises(ValueError, match=r"budget_bits 3 and quality 0.01 exclude each other"):
        make_setting("strata", None, 3.0, "planes", None, None, None, 0.01)
    with pytest.raises(ValueError, match="quality is -1; it must be"):
        make_setting("strata", None, None, "planes", None, None, None, -1)
