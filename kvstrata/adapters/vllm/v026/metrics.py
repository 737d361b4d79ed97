"""kvstrata_* on the engine's own /metrics, and the capacity in its log."""

from typing import Any

from prometheus_client import REGISTRY
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import PrometheusStatLogger

from kvstrata.adapters.vllm.figures import Collector, Figures, Writer, figures_path
from kvstrata.adapters.vllm.refusal import asks
from kvstrata.adapters.vllm.v026.manager import FrameManager
from kvstrata.types import PAGE_SIZE

_MARK = "_kvstrata_original"
logger = init_logger("vllm.kvstrata")


class SchedulerFigures:
    """Figures of one scheduler, written now and then."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, manager: FrameManager) -> None:
        spec, layers = manager.kv_cache_spec, len(kv_cache_config.kv_cache_groups[0].layer_names)
        longest = vllm_config.model_config.max_model_len
        frames = manager.block_pool.num_gpu_blocks - 1
        frame_bytes = spec.page_size_bytes * layers
        self._fixed = {
            "frames": frames,
            "frame_bytes": frame_bytes,
            "capacity_tokens": frames * longest // spec.max_frames(longest),
            "bf16_tokens": frames * frame_bytes // (spec.layout.bf16_bytes(PAGE_SIZE) * layers // PAGE_SIZE),
        }
        self._manager = manager
        rank = vllm_config.parallel_config.data_parallel_index
        self._writer = Writer(figures_path(vllm_config.instance_id, rank))
        logger.info(
            "kvstrata: %s; %s frames of %s bytes; KV capacity %s tokens, %.2f times the %s of bfloat16 in the same bytes",
            _setting(spec), f"{frames:,}", f"{frame_bytes:,}", f"{self._fixed['capacity_tokens']:,}",
            self._fixed["capacity_tokens"] / max(1, self._fixed["bf16_tokens"]), f"{self._fixed['bf16_tokens']:,}",
        )  # fmt: skip

    def figures(self, running: list[Any]) -> Figures:
        manager, cached = self._manager, self._manager.cached
        return Figures(
            **self._fixed, held_frames=self._fixed["frames"] - manager.block_pool.get_num_free_blocks(),
            computed_tokens=sum(r.num_computed_tokens for r in running), found_pages=manager.found_pages,
            broken_pages=cached.broken, demoted_pages=cached.demoted, dropped_pages=cached.dropped,
            tokens={t.name: n for t, n in manager.tokens_by_tier.items()},
            cached_pages={t.name: n for t, n in cached.by_tier.items()},
        )  # fmt: skip

    def write(self, running: list[Any]) -> None:
        self._writer.write(lambda: self.figures(running), last=not running)

    def remove(self) -> None:
        self._writer.remove()


def _setting(spec: Any) -> str:
    s = spec.settings
    return (
        f"policy {s.policy}, "
        + (f"{s.budget_bits:g} real bits" if s.tier is None else f"tier {s.tier.name}")
        + f", window {s.window}"
        + ("" if s.ageing is None else f", ageing to {s.ageing.name}")
    )


def watch_metrics() -> None:
    """Let the process that serves /metrics serve ours too."""
    if hasattr(PrometheusStatLogger, _MARK):
        return
    original = PrometheusStatLogger.__init__
    last: list[Collector] = []

    def init(self: Any, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        original(self, vllm_config, engine_indexes)
        # an engine of the same process, started later, takes the place of the one before
        while last:
            REGISTRY.unregister(last.pop())
        if asks(vllm_config):
            paths = {str(i): figures_path(vllm_config.instance_id, i) for i in self.engine_indexes}
            last.append(Collector(paths, {"model_name": str(vllm_config.model_config.served_model_name)}))
            REGISTRY.register(last[0])

    PrometheusStatLogger.__init__ = init
    setattr(PrometheusStatLogger, _MARK, original)
