"""An engine in this process, whose books are looked at before and after every decision of its scheduler."""

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

Work = tuple[list[int], int]
"""Token ids of a prompt, and how many tokens to generate."""


@dataclass
class Seen:
    steps: int = 0
    preempted: int = 0
    most_running: int = 0
    most_tokens: int = 0


@dataclass(frozen=True)
class Result:
    tokens: list[int]
    found: int
    """Prompt tokens that were in the cache."""
    logits: torch.Tensor | None = None
    """float32 [tokens, vocabulary], where they were asked for."""


class Engine:
    def __init__(self, settings: dict[str, Any] | None, **arguments: Any) -> None:
        defaults: dict[str, Any] = {
            "max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 16, "dtype": "float32", "enforce_eager": True,
            "compilation_config": {"mode": 0}, "disable_log_stats": True,
            # looking at all books takes as long as there are blocks
            "num_gpu_blocks_override": 2500,
        }  # fmt: skip
        if settings is not None:
            defaults["additional_config"] = {"kvstrata": settings}
        self.llm = LLM(**defaults | arguments)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.seen = Seen()
        if settings is not None:
            self._watch()

    def _watch(self) -> None:
        scheduler, frames = self.scheduler, self.scheduler.frames
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def watched(*args: Any, **kwargs: Any) -> Any:
            frames.check_integrity()
            out = schedule(*args, **kwargs)
            frames.check_integrity()
            self.seen.steps += 1
            self.seen.most_running = max(self.seen.most_running, len(scheduler.running))
            self.seen.most_tokens = max(self.seen.most_tokens, sum(r.num_computed_tokens for r in scheduler.running))
            return out

        def counted(*args: Any) -> None:
            self.seen.preempted += 1
            preempt(*args)

        scheduler.schedule, scheduler._preempt_request = watched, counted

    def run(self, work: Sequence[Work], *, logits: bool = False, extra: Sequence[dict[str, Any] | None] | None = None) -> list[Result]:
        """All requests at once, greedily; at the end nothing is held."""
        extras = extra or [None] * len(work)
        params = [
            SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False, logprobs=-1 if logits else None, extra_args=e)
            for (_, n), e in zip(work, extras, strict=True)
        ]
        out = self.llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params, use_tqdm=False)
        if hasattr(self.scheduler, "frames"):
            books = self.scheduler.frames.check_integrity()
            assert books["held"] == 0 and books["free"] == books["total"], books
        return [Result(list(o.outputs[0].token_ids), o.num_cached_tokens or 0, _logits(o.outputs[0]) if logits else None) for o in out]

    def alone(self, work: Sequence[Work], **kwargs: Any) -> list[Result]:
        """The same, one after another, with nothing of one left for the next."""
        out = []
        for item in work:
            assert self.llm.reset_prefix_cache()
            out += self.run([item], **kwargs)
        assert self.llm.reset_prefix_cache()
        return out

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core, self.scheduler
        gc.collect()
        cleanup_dist_env_and_memory()


def _logits(output: Any) -> torch.Tensor:
    rows = [torch.tensor([row[i].logprob for i in range(len(row))]) for row in output.logprobs]
    return torch.stack(rows)


def mixed_work(seed: int = 0, n: int = 12, vocabulary: int = 49_000) -> list[Work]:
    """Groups of shared prefixes, odd lengths, a prompt that is another's prefix, and one twice."""
    r = random.Random(seed)

    def ids(k: int) -> list[int]:
        return [r.randrange(20, vocabulary) for _ in range(k)]

    prefixes = [ids(320), ids(200), ids(97), []]
    work = [(prefixes[i % 4] + ids(r.randrange(5, 150)), r.randrange(20, 80)) for i in range(n - 2)]
    return [*work, (work[0][0][:330], 70), work[1]]


def growing_work(seed: int = 1, n: int = 10, vocabulary: int = 49_000) -> list[Work]:
    """Prompts shorter than a page, but for some that share a prefix, and replies of some pages: what is admitted outgrows a small pool."""
    r = random.Random(seed)
    prefix = [r.randrange(20, vocabulary) for _ in range(70)]
    return [
        ((prefix if i % 3 == 2 else []) + [r.randrange(20, vocabulary) for _ in range(r.randrange(5, 28))], r.randrange(70, 120))
        for i in range(n)
    ]


def tokens(results: Sequence[Result]) -> list[list[int]]:
    return [r.tokens for r in results]
