"""The engine's configuration: kvstrata's settings in it, what they change, and what is refused. Knows nothing of blocks or kernels."""

import os
from collections.abc import Iterator
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.engine.input_processor import InputProcessor

from kvstrata.adapters.vllm.causal import check_request, most_frames
from kvstrata.adapters.vllm.refusal import asks
from kvstrata.adapters.vllm.settings import CONFIG_KEY, EngineSettings, UnsupportedEngineError
from kvstrata.adapters.vllm.tags import template_text
from kvstrata.ops.frame import HEAD_DIMS
from kvstrata.types import PAGE_SIZE

BACKEND = "kvstrata.adapters.vllm.v026.backend.FrameBackend"
SCHEDULERS = {
    False: "kvstrata.adapters.vllm.v026.scheduler.FrameScheduler",
    True: "kvstrata.adapters.vllm.v026.scheduler.AsyncFrameScheduler",
}
"""By whether the engine schedules asynchronously."""
CACHE_TYPES = ("auto", "bfloat16", "float16")
_MARK = "_kvstrata_original"


def settings_of(vllm_config: Any) -> EngineSettings | None:
    """kvstrata's settings, or None where the config does not ask for it. Raises ValueError for unknown or wrong ones."""
    if not asks(vllm_config):
        return None
    values = dict(vllm_config.additional_config[CONFIG_KEY] or {})
    if values.get("dense_dtype") is None and vllm_config.model_config is not None:
        values["dense_dtype"] = "float16" if str(vllm_config.model_config.dtype) == "torch.float16" else "bfloat16"
    return EngineSettings.from_dict(values)


def unsupported(vllm_config: Any) -> Iterator[str]:
    """One line for each thing in the config that is not supported."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    text = model.hf_text_config
    if vllm_config.speculative_config is not None:
        yield "speculative decoding is not supported; leave --speculative-config out"
    if vllm_config.kv_transfer_config is not None:
        yield "KV connectors are not supported; leave --kv-transfer-config and KV offloading out"
    if model.use_mla:
        yield "multi-head latent attention keeps no keys and values to store; accepted: models of full attention"
    elif model.is_hybrid or model.is_attention_free or model.is_encoder_decoder or getattr(model, "is_diffusion", False):
        yield f"model type {text.model_type!r} is not supported; accepted: decoders whose every layer is full attention"
    elif has_sliding_window(model, text):
        yield f"model type {text.model_type!r} has sliding-window layers; accepted: models whose every layer is full attention"
    elif model.get_head_size() not in HEAD_DIMS:
        yield f"head_dim {model.get_head_size()} is not supported; accepted: {', '.join(map(str, HEAD_DIMS))}"
    if cache.cache_dtype not in CACHE_TYPES:
        yield f"--kv-cache-dtype {cache.cache_dtype} and kvstrata exclude each other; accepted: {', '.join(CACHE_TYPES)}"
    if cache.user_specified_block_size and cache.block_size != PAGE_SIZE:
        yield f"--block-size is {cache.block_size}; accepted: {PAGE_SIZE}, the tokens of a page"
    for flag, size in (
        ("decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("prefill-context-parallel-size", parallel.prefill_context_parallel_size),
        ("pipeline-parallel-size", parallel.pipeline_parallel_size),
    ):
        if size > 1:
            yield f"--{flag} {size} is not supported; accepted: 1"
    if parallel.enable_dbo:
        yield "--enable-dbo is not supported; leave it out"
    if vllm_config.scheduler_config.policy != "fcfs":
        yield f"--scheduling-policy {vllm_config.scheduler_config.policy} is not supported; accepted: fcfs"
    if vllm_config.scheduler_config.scheduler_cls not in (None, *SCHEDULERS.values()):
        yield f"--scheduler-cls {vllm_config.scheduler_config.scheduler_cls} is not supported; leave it out"
    if model.enable_prompt_embeds:
        yield "--enable-prompt-embeds is not supported: pages are planned and shared by token ids"
    if cache.kv_sharing_fast_prefill:
        yield "--kv-sharing-fast-prefill is not supported; leave it out"
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        yield "VLLM_USE_V2_MODEL_RUNNER=1 is not supported; accepted: 0, or unset"


def has_sliding_window(model: Any, text: Any) -> bool:
    types = getattr(text, "layer_types", None) or ()
    return model.get_sliding_window() is not None or any(t != "full_attention" for t in types)


def configure(vllm_config: Any) -> None:
    """Check kvstrata's settings against the engine's and put them into effect. Raises UnsupportedEngineError, one line a reason."""
    settings = settings_of(vllm_config)
    if settings is None or vllm_config.model_config is None:
        return
    reasons = list(unsupported(vllm_config))
    if settings.policy == "triaxial" and vllm_config.model_config.skip_tokenizer_init:
        reasons.append("policy 'triaxial' needs the tokenizer; leave --skip-tokenizer-init out, or choose policy 'uniform'")
    if settings.policy == "triaxial" and settings.chat_template is not None:
        try:
            template_text(settings.chat_template)
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise UnsupportedEngineError("\n".join(f"kvstrata: {reason}" for reason in reasons))
    # names a budget below the floor before anything is loaded
    most_frames(settings, settings.layout(1, vllm_config.model_config.get_head_size()), vllm_config.model_config.max_model_len)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    vllm_config.cache_config.block_size = PAGE_SIZE
    vllm_config.cache_config.user_specified_block_size = True
    vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
    vllm_config.scheduler_config.scheduler_cls = SCHEDULERS[bool(vllm_config.scheduler_config.async_scheduling)]
    vllm_config.model_config.disable_cascade_attn = True


def watch_configs() -> None:
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    platform = type(current_platform)
    if hasattr(platform, _MARK):
        return
    check, choose = platform.check_and_update_config, platform.get_attn_backend_cls

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        check(vllm_config)
        configure(vllm_config)

    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if selected_backend is AttentionBackendEnum.CUSTOM and current_platform.is_cpu():
            return BACKEND
        return str(choose(selected_backend, *args, **kwargs))

    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    setattr(platform, _MARK, check)


def watch_requests() -> None:
    if hasattr(InputProcessor, _MARK):
        return
    original, process = InputProcessor._validate_params, InputProcessor.process_inputs

    def validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        original(self, params, *args, **kwargs)
        settings = settings_of(self.vllm_config)
        if settings is not None:
            layout = settings.layout(1, self.vllm_config.model_config.get_head_size())
            check_request(settings, layout, getattr(params, "extra_args", None))

    def process_inputs(self: Any, *args: Any, resumable: bool = False, **kwargs: Any) -> Any:
        # such a session takes back its last token's page when more input comes
        if resumable and settings_of(self.vllm_config) is not None:
            raise ValueError("kvstrata: streaming input sessions are not supported; accepted: requests whose prompt is whole")
        return process(self, *args, resumable=resumable, **kwargs)

    InputProcessor._validate_params = validate_params
    InputProcessor.process_inputs = process_inputs
    setattr(InputProcessor, _MARK, original)
