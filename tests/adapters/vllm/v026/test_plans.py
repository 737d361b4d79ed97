"""Plans of requests, without an engine: who may share pages with whom."""

from types import SimpleNamespace
from typing import Any

import torch

from kvstrata.adapters.vllm.settings import EngineSettings
from kvstrata.adapters.vllm.v026.plans import Plans
from kvstrata.adapters.vllm.v026.spec import FrameSpec

SERVER = {"policy": "uniform", "budget_bits": 4.0}


def plans() -> Plans:
    spec = FrameSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.uint8, settings=EngineSettings.from_dict(SERVER))
    return Plans(SimpleNamespace(additional_config={"kvstrata": SERVER}, model_config=None), spec, None)


def salt(extra: dict[str, Any] | None, sent: str | None) -> str | None:
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args=extra), cache_salt=sent, block_hashes=[], update_block_hashes=lambda: None
    )
    plans().salt(request)
    return request.cache_salt


def test_pages_of_other_settings_are_not_shared_whatever_salt_a_client_sends() -> None:
    own = {"kvstrata_budget_bits": 3.0}
    assert salt(None, None) is None and salt(None, "mine") == "mine"
    assert salt({"kvstrata_budget_bits": 4}, "mine") == "mine", "the server's own settings"
    ours = salt(own, None)
    assert ours is not None and salt(own, "mine") not in (ours, "mine")
    # what a client has read or computed
    seen = [salt(extra, sent) for extra in (own, None, {"kvstrata_budget_bits": 3.5}) for sent in ("", "mine", ours, f"{ours}{ours}")]
    assert len(set(seen)) == len(seen)
