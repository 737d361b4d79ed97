"""CUDA sources compiled without a GPU, and what cuobjdump, which comes with Triton, says of them."""

import subprocess
import tempfile
from pathlib import Path

import triton

from kvstrata.ops import cuda

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def inspect(name, options, *flags):
    """Texts of cuobjdump about source NAME compiled with these options, one a flag."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cuda.compile_source(cuda.source(name), options))
        file.flush()
        return [subprocess.run([CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True).stdout for flag in flags]
