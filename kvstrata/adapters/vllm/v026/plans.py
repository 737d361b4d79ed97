"""The plan of each request in the engine: its settings, its tags, its tiers so far. Tiers are decided here, once, for all ranks."""

import hashlib
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config

from kvstrata.adapters.vllm.ageing import Losses, Worth
from kvstrata.adapters.vllm.causal import CausalPlanner, Market
from kvstrata.adapters.vllm.settings import EngineSettings, request_settings
from kvstrata.adapters.vllm.tags import PageTagger, served_reader
from kvstrata.adapters.vllm.v026.config import settings_of
from kvstrata.adapters.vllm.v026.spec import FrameSpec
from kvstrata.types import PAGE_SIZE, Tier

_SALT = "kvstrata:"


class Plans:
    def __init__(self, vllm_config: Any, spec: FrameSpec, worth: Worth | None) -> None:
        settings = settings_of(vllm_config)
        assert settings is not None
        self.settings, self.layout, self._worth = settings, spec.layout, worth
        self._planners: dict[str, CausalPlanner] = {}
        self._reader = None
        if settings.policy == "triaxial":
            # the same for every request: none chooses its own tiers, profile or horizon
            self._market = Market.of(settings, self.layout)
            self._reader = served_reader(cached_tokenizer_from_config(vllm_config.model_config), settings.chat_template)

    def tiers(self, request: Any, num_pages: int) -> list[Tier]:
        """Tiers of at least the first `num_pages` pages of a request whose token ids are known so far."""
        planner = self._planners.get(request.request_id)
        if planner is None:
            planner = self._planners[request.request_id] = self._new(self._settings_of(request))
        if len(planner.tiers) < num_pages:
            planner.extend(request.all_token_ids[: num_pages * PAGE_SIZE], num_pages)
        return planner.tiers

    def losses(self, request_id: str, page: int) -> Losses:
        """What a page whose tier is decided loses by age and tier; nothing is known where pages do not age."""
        return self._planners[request_id].losses[page] if self._worth is not None else ()

    def forget(self, request_id: str) -> None:
        self._planners.pop(request_id, None)

    def salt(self, request: Any) -> None:
        """Pages of a request with settings of its own are shared with its like alone: their tiers differ. A salt that a client sends is
        told from ours, whatever it is."""
        settings, sent = self._settings_of(request), request.cache_salt or ""
        if settings == self.settings and not sent.startswith(_SALT):
            return
        own = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
        request.cache_salt = f"{_SALT}{own}:{sent}"
        request.block_hashes.clear()
        request.update_block_hashes()

    def _settings_of(self, request: Any) -> EngineSettings:
        return request_settings(self.settings, getattr(request.sampling_params, "extra_args", None))

    def _new(self, settings: EngineSettings) -> CausalPlanner:
        if self._reader is None:
            return CausalPlanner(settings, self.layout, worth=self._worth)
        return CausalPlanner(settings, self.layout, PageTagger(self._reader), self._market, self._worth)
