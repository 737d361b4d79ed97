"""The engine's workers: at each step they take over its new pages and settle what the last step completed. Knows nothing of schedulers."""

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvstrata.adapters.vllm.delta import StepDelta
from kvstrata.adapters.vllm.v026.backend import FrameBuilder

_MARK = "_kvstrata_original"


def builder_of(runner: Any) -> FrameBuilder | None:
    """The builder of the runner's only attention group, if it is ours."""
    groups = [group for of_cache in runner.attn_groups for group in of_cache]
    builders = [group.get_metadata_builder() for group in groups]
    return builders[0] if len(builders) == 1 and isinstance(builders[0], FrameBuilder) else None


def watch_steps() -> None:
    if hasattr(GPUModelRunner, _MARK):
        return
    original = GPUModelRunner._update_states

    def update_states(self: Any, scheduler_output: Any) -> Any:
        result = original(self, scheduler_output)
        delta: StepDelta | None = getattr(scheduler_output, "kvstrata", None)
        builder = builder_of(self) if delta is not None else None
        if builder is not None and delta is not None:
            builder.begin_step(delta, scheduler_output.finished_req_ids, self.input_batch.req_ids,
                               scheduler_output.num_scheduled_tokens, self.kv_caches)  # fmt: skip
        return result

    GPUModelRunner._update_states = update_states
    setattr(GPUModelRunner, _MARK, original)
