"""vLLM 0.26: everything that touches the engine. `install` is the plugin; it patches six places, each inert until a config asks for it.

Platform.check_and_update_config      settings are checked, what is not supported is refused, scheduler and backend are chosen
CpuPlatform.get_attn_backend_cls      a CPU would ignore the choice of a backend
Attention.get_kv_cache_spec           layers ask for frames
GPUModelRunner._update_states         workers take over a step's new pages
InputProcessor._validate_params       a request's own settings are checked where the client can be told
"""

from kvstrata.adapters.vllm.v026.config import watch_configs, watch_requests
from kvstrata.adapters.vllm.v026.metrics import watch_metrics
from kvstrata.adapters.vllm.v026.spec import register_spec
from kvstrata.adapters.vllm.v026.worker import watch_steps

__all__ = ["install"]


def install() -> None:
    """Called once in each of the engine's processes."""
    watch_configs()
    watch_requests()
    register_spec()
    watch_steps()
    watch_metrics()
