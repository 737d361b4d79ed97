"""What one engine does under load, in a process of its own: a line of JSON for each load. `bench_vllm.py` starts it with a Setup as JSON.

throughput    requests of random tokens, all at once
replay        sessions of many turns: each turn is the one before, its reply, and new observation tokens
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.vllm_profile import StepProfile

SETTING = "strata"
"""As a kv_cache_dtype: kvstrata's own. Others are the engine's."""
RESULT = "RESULT "
FRAMING = 64
"""Tokens that a chat template may put around a turn."""
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """throughput: `requests` of input_tokens + output_tokens. replay: `requests` sessions of `turns`, each of which adds between a half of
    input_tokens and all, and writes between a third of output_tokens and all."""

    scenario: str
    requests: int
    input_tokens: int
    output_tokens: int
    turns: int = 1

    @classmethod
    def parse(cls, text: str) -> "Load":
        """`48x8192/256`: 48 requests of 8192 + 256 tokens; `32x2000/300x8`: 32 sessions of 8 turns. Raises ValueError."""
        try:
            requests, rest = text.split("x", 1)
            tokens, _, turns = rest.partition("x")
            given, written = tokens.split("/")
            return cls("replay" if turns else "throughput", int(requests), int(given), int(written), int(turns or 1))
        except ValueError as error:
            raise ValueError(f"load is {text!r}; accepted: REQUESTSxINPUT/OUTPUT, or SESSIONSxINPUT/OUTPUTxTURNS") from error

    @property
    def longest(self) -> int:
        return self.turns * (self.input_tokens + self.output_tokens) + 16


@dataclass(frozen=True, slots=True)
class Setup:
    """kv: a kv_cache_dtype of the engine, or `strata`. model: a folder; None: random weights in the shape of Qwen3 8B.
    kv_bytes: of the KV cache, per rank. settings: kvstrata's, for `strata`. profile: look into steps of the first load of throughput.
    chat: turns of a replay are user messages of the model's chat template."""

    kv: str
    kv_bytes: int
    loads: tuple[dict[str, Any], ...]
    model: str | None = None
    tensor_parallel: int = 1
    max_num_seqs: int = 128
    settings: dict[str, Any] | None = None
    eager: bool = False
    profile: bool = False
    seed: int = 0
    chat: bool = False
    engine: dict[str, Any] = field(default_factory=dict)

    def parsed(self) -> list[Load]:
        return [Load(**values) for values in self.loads]


def start(setup: Setup) -> Any:
    from vllm import LLM

    folder, weights = setup.model, "auto"
    if folder is None:
        folder, weights = str(Path(tempfile.gettempdir()) / "qwen3-8b-shape"), "dummy"
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "config.json").write_text(json.dumps(QWEN3_8B))
    longest = max(load.longest + setup.chat * FRAMING * load.turns for load in setup.parsed())
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]}
    arguments: dict[str, Any] = {"kv_cache_dtype": setup.kv}
    if setup.kv == SETTING:
        arguments = {"additional_config": {"kvstrata": setup.settings or {}}}
    return LLM(**{
        "model": folder, "skip_tokenizer_init": True, "load_format": weights, "dtype": "bfloat16", "enable_prefix_caching": True,
        "max_model_len": longest, "kv_cache_memory_bytes": setup.kv_bytes,
        "max_num_seqs": setup.max_num_seqs, "max_num_batched_tokens": 8192, "tensor_parallel_size": setup.tensor_parallel,
        "enforce_eager": setup.eager, "disable_log_stats": False, "compilation_config": {"mode": 0, **({} if setup.eager else graphs)},
    } | arguments | setup.engine)  # fmt: skip


def vocabulary(llm: Any) -> int:
    return int(llm.llm_engine.vllm_config.model_config.get_vocab_size())


def framing(llm: Any) -> tuple[list[int], list[int], list[int]]:
    """Token ids of the model's chat template: before the first user message, after one, and between a reply and the next."""
    tokenizer = llm.get_tokenizer()
    marks = ["@0@", "@1@", "@2@"]
    messages = [{"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), marks, strict=True)]
    rest, parts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), []
    for mark in marks:
        part, rest = rest.split(mark)
        parts.append(tokenizer.encode(part, add_special_tokens=False))
    before, after, between = parts
    return before, after, between


def params(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)


def throughput(llm: Any, load: Load, seed: int, look: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """look: called after each step with the engine."""
    engine, words, rng = llm.llm_engine, vocabulary(llm), random.Random(f"{seed}-{load}")
    prompts = [[rng.randrange(words) for _ in range(load.input_tokens)] for _ in range(load.requests)]
    # warms up; other tokens, so that nothing of the prompts is in the cache
    llm.generate([{"prompt_token_ids": [rng.randrange(words) for _ in range(load.input_tokens)]}], params(4), use_tqdm=False)
    begin = time.perf_counter()
    for i, ids in enumerate(prompts):
        engine.add_request(f"{load}-{i}", {"prompt_token_ids": ids}, params(load.output_tokens))
    written = first = 0
    while engine.has_unfinished_requests():
        for out in engine.step():
            if not first and out.outputs[0].token_ids:
                first = time.perf_counter()
            written += len(out.outputs[0].token_ids) if out.finished else 0
        if look is not None:
            look(engine)
    seconds = time.perf_counter() - begin
    assert written == load.requests * load.output_tokens
    return {"seconds": seconds, "output_tokens_a_second": written / seconds, "first_token_seconds": first - begin}


def replay(llm: Any, load: Load, seed: int, look: Callable[[Any], None] | None = None, chat: bool = False) -> dict[str, Any]:
    """All sessions at once; each sends its next turn as soon as it has the reply to the last."""
    engine, words = llm.llm_engine, range(vocabulary(llm))
    before, after, between = framing(llm) if chat else ([], [], [])
    # no message holds a mark of the template
    marks = set(llm.get_tokenizer().added_tokens_decoder) if chat else set()
    rngs = [random.Random(f"{seed}-{s}") for s in range(load.requests)]
    history: list[list[int]] = [[] for _ in rngs]
    turn, sent, first = [0] * len(rngs), [0.0] * len(rngs), defaultdict(list)
    waiting: set[int] = set()
    found = asked = 0

    def send(s: int) -> None:
        rng = rngs[s]
        text = [rng.choice(words) for _ in range(rng.randint(load.input_tokens // 2, load.input_tokens))]
        text = [i for i in text if i not in marks]
        history[s] += [*(between if history[s] else before), *text, *after]
        sent[s] = time.perf_counter()
        waiting.add(s)
        wanted = rng.randint(max(1, load.output_tokens // 3), load.output_tokens)
        engine.add_request(f"{s}-{turn[s]}", {"prompt_token_ids": list(history[s])}, params(wanted))

    begin = time.perf_counter()
    for s in range(len(rngs)):
        send(s)
    written = 0
    while engine.has_unfinished_requests():
        for out in engine.step():
            s = int(out.request_id.split("-")[0])
            if s in waiting and out.outputs[0].token_ids:
                waiting.remove(s)
                first[turn[s]].append(time.perf_counter() - sent[s])
            if not out.finished:
                continue
            found += out.num_cached_tokens or 0
            asked += len(history[s])
            written += len(out.outputs[0].token_ids)
            history[s] += out.outputs[0].token_ids
            turn[s] += 1
            if turn[s] < load.turns:
                send(s)
    seconds = time.perf_counter() - begin
    assert turn == [load.turns] * len(rngs)
    return {
        "seconds": seconds, "turns_a_second": sum(turn) / seconds, "output_tokens_a_second": written / seconds, "hit_rate": found / asked,
        "first_token": {t: {"p50": statistics.median(x), "p95": sorted(x)[int(0.95 * (len(x) - 1))]} for t, x in sorted(first.items())},
    }  # fmt: skip


def books(llm: Any) -> dict[str, Any]:
    """What the strata's scheduler counted since the start."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return asdict(scheduler.figures.figures(scheduler.running))


def preemptions(llm: Any) -> float:
    """Since the start, as the engine counts them."""
    return float(sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"))


def capacity(llm: Any, setup: Setup, tokens: int) -> int:
    """Tokens that the KV cache holds when all requests are of so many tokens."""
    config = llm.llm_engine.vllm_config.cache_config
    if setup.kv != SETTING:
        return int(config.num_gpu_blocks * config.block_size)
    from kvstrata.adapters.vllm.causal import most_frames
    from kvstrata.adapters.vllm.v026.config import settings_of

    model = llm.llm_engine.vllm_config.model_config
    settings = settings_of(llm.llm_engine.vllm_config)
    assert settings is not None
    layout = settings.layout(model.get_total_num_kv_heads(), model.get_head_size())
    return (config.num_gpu_blocks - 1) * tokens // most_frames(settings, layout, tokens)


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    setup = Setup(**json.loads(sys.argv[1]))
    begin = time.perf_counter()
    llm = start(setup)
    ready = time.perf_counter() - begin
    import torch

    common = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        **{k: v for k, v in asdict(setup).items() if k not in ("loads", "profile")},
        # where a folder lies is one machine's affair
        "model": setup.model and Path(setup.model).name,
        "start_seconds": ready, "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
    }  # fmt: skip
    print(f"ready in {ready:.1f} s", flush=True)
    profile = StepProfile() if setup.profile else None
    for load in setup.parsed():
        before = preemptions(llm)
        look = profile if load.scenario == "throughput" and profile is not None and not profile.done else None
        if load.scenario == "throughput":
            result = throughput(llm, load, setup.seed, look)
        else:
            result = replay(llm, load, setup.seed, look, setup.chat)
        if setup.kv == SETTING:
            result["books"] = books(llm)
        row = {**common, **asdict(load), "kv_tokens": capacity(llm, setup, load.longest - 16), **result,
               "preemptions": preemptions(llm) - before}  # fmt: skip
        if look is not None:
            row["profile"] = look.summary()
        print(RESULT + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
