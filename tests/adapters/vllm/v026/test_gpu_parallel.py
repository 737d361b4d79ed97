"""Two GPUs: the tokens of one, with graphs and a step ahead, hits and pages that gave up planes. Sums of two ranks are in another order
than one's, so few requests may part (test_gpu.py)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .engines import Engine
from .test_gpu import COMMON, GRAPHS, SETTINGS, VOCABULARY, WORK, agree, begin, model

__all__ = ["begin", "model"]
# tensor parallelism takes as many devices as ranks
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two GPUs")]
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}


@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS | {"window": 0, "ageing": "INT2"}], ids=["plain", "ageing"])
def test_two_gpus_give_the_tokens_of_one(begin: Callable[..., Engine], settings: dict[str, Any]) -> None:
    assert COMMON["dtype"] == "bfloat16"
    waves, books = [], []
    for parallel in ({}, TWO):
        engine = begin(settings, num_gpu_blocks_override=450, max_logprobs=VOCABULARY, **parallel, **GRAPHS)
        waves.append([engine.run(wave, logits=True) for wave in (WORK, WORK[::-1])])
        cached = engine.scheduler.frames.cached
        books.append((cached.demoted, [[r.found for r in wave] for wave in waves[-1]]))
    one, two = waves
    agree(two[0], one[0], 3, 0.5)
    # tiers depend on token ids alone, and so does what is found; tokens that part make other pages
    assert books[1][1][0] == books[0][1][0]
    assert all((demoted > 0) == ("ageing" in settings) for demoted, _ in books)
