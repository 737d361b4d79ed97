"""Joining profiles of several models."""

import numpy as np
import pytest

from kvstrata.calibrate.join import join
from kvstrata.policy.profile import load_profile, mean_profile


def test_the_default_is_the_mean_of_the_models_that_it_names(tmp_path):
    default = load_profile("default")
    join(list(default.made["models"]), tmp_path / "joined.json")
    joined = load_profile(str(tmp_path / "joined.json"))
    for measure in default.loss:
        np.testing.assert_allclose(joined.loss[measure], default.loss[measure], rtol=1e-3)
    assert set(default.made["models"]) == {"qwen05", "qwen15", "smollm2"}


def test_one_profile_joined_is_itself_but_for_scale(tmp_path):
    own = load_profile("smollm2")
    ratio = mean_profile([own], own.made).loss["relative"] / np.where(own.loss["relative"], own.loss["relative"], 1)
    seen = ratio[own.loss["relative"] > 0]
    np.testing.assert_allclose(seen, seen[0], rtol=1e-9)


def test_profiles_of_unlike_codecs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="codecs planes, triaxial"):
        join(["qwen05", "qwen05-triaxial"], tmp_path / "joined.json")
    assert not list(tmp_path.iterdir())
