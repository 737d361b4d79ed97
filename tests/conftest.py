"""Threads, Hypothesis, Triton's interpreter, and the models that tests share."""

import os

# before torch and Triton are imported: without a GPU, kernels run in Triton's interpreter; tokenizers fork no threads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.path.exists("/proc/driver/nvidia/version"):  # noqa: PTH110
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.modeling_utils import PreTrainedModel

ROOT = Path(__file__).parents[1]

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(2, os.cpu_count() or 1))

# the same examples on every machine and every run; a slow machine is no failure
settings.register_profile("kvstrata", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("kvstrata")


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """Folder of a model that `make test` fetched: model_path("smollm2"). KVSTRATA_MODELS, or ./models, holds them."""

    def find(name: str) -> Path:
        folder = Path(os.environ.get("KVSTRATA_MODELS", ROOT / "models")) / name
        if not (folder / "model.safetensors").exists():
            raise FileNotFoundError(f"no model in {folder}; fetch it: python -m kvstrata.eval.models {name} {folder}")
        return folder

    return find


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> "PreTrainedTokenizerBase":
    """Of qwen05, and `model`: of its vocabulary, tiny and random. Tests that need others have their own."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path("qwen05"))


@pytest.fixture(scope="module")
def model(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedModel":
    from tests.models import tiny

    return tiny("qwen2", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
