"""Threads, Hypothesis, Triton's interpreter, and the models that tests share."""

import os

# before torch and Triton are imported: without a GPU, kernels run in Triton's interpreter; tokenizers fork no threads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.path.exists("/proc/driver/nvidia/version"):  # noqa: PTH110
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

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
