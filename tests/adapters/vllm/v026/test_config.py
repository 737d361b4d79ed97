"""What an engine's configuration is refused for, in one line each, before anything is loaded; and that it is left alone otherwise."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig
from vllm.engine.arg_utils import EngineArgs

from kvstrata.adapters.vllm.v026.config import unsupported

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
OURS = {"kvstrata": {"policy": "uniform", "tier": "INT4"}}


def config(model: Path | str, **arguments: Any) -> Any:
    given: dict[str, Any] = {"max_model_len": 512, "enforce_eager": True, "additional_config": OURS}
    return EngineArgs(model=str(model), **given | arguments).create_engine_config()


def test_a_supported_config_gets_scheduler_backend_and_page_size(tiny_model: Path) -> None:
    c = config(tiny_model)
    assert c.cache_config.block_size == 32
    assert c.scheduler_config.scheduler_cls == "kvstrata.adapters.vllm.v026.scheduler.FrameScheduler"
    assert c.attention_config.backend.name == "CUSTOM"
    assert not c.scheduler_config.async_scheduling


def test_without_our_setting_nothing_changes(tiny_model: Path) -> None:
    c = config(tiny_model, additional_config={})
    assert c.scheduler_config.scheduler_cls is None and c.attention_config.backend is None and c.cache_config.block_size == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_config": SPECULATIVE}, "speculative decoding is not supported"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 and kvstrata exclude each other; accepted: auto"),
        ({"block_size": 64}, "--block-size is 64; accepted: 32"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "KV connectors are not supported"),
        ({"scheduling_policy": "priority"}, "--scheduling-policy priority is not supported; accepted: fcfs"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2 is not supported"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds is not supported"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls .* is not supported"),
        ({"additional_config": {"kvstrata": {"bits": 3}}}, "unknown EngineSettings key 'bits'"),
        ({"additional_config": {"kvstrata": {"budget_bits": 2.0}}}, "budget_bits 2 is below 2.38, what INT2 takes"),
        ({"additional_config": {"kvstrata": {"budget_bits": 3.0, "chat_template": "no.jinja"}}}, "chat_template 'no.jinja' cannot be read"),
        ({"additional_config": {"kvstrata": {"budget_bits": 3.0}}, "skip_tokenizer_init": True}, "policy 'triaxial' needs the tokenizer"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(tiny_model: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tiny_model, **arguments)


def saved(folder: Path, tiny_model: Path, made: Any) -> Path:
    """A folder with this config and the tiny model's tokenizer; there are no weights to load."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    made.save_pretrained(folder)
    return folder


def test_models_of_other_shapes_are_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    odd = LlamaConfig(**sizes, head_dim=32, architectures=["LlamaForCausalLM"])
    with pytest.raises(ValueError, match="head_dim 32 is not supported; accepted: 64, 80, 96, 128, 256"):
        config(saved(tmp_path, tiny_model, odd))
    sliding = MistralConfig(**sizes, head_dim=64, num_key_value_heads=2, sliding_window=64, architectures=["MistralForCausalLM"])
    with pytest.raises(ValueError, match="has sliding-window layers"):
        config(saved(tmp_path, tiny_model, sliding))


def test_what_no_small_model_shows_is_refused_too(tiny_model: Path) -> None:
    c = config(tiny_model)
    c.parallel_config.decode_context_parallel_size = 2
    c.parallel_config.enable_dbo = True
    latent = {name: getattr(c.model_config, name) for name in ("hf_text_config", "enable_prompt_embeds")} | {"use_mla": True}
    c.model_config = SimpleNamespace(**latent)
    assert [line[:40] for line in unsupported(c)] == [
        "multi-head latent attention keeps no keys"[:40],
        "--decode-context-parallel-size 2 is not supported"[:40],
        "--enable-dbo is not supported; leave it out"[:40],
    ]


def test_the_second_runner_is_refused_where_it_is_asked_for(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=1 is not supported"):
        config(tiny_model)
