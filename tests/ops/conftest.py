"""Kernels' tests: interpreted without a GPU (and on a NumPy newer than Triton's interpreter), compiled and marked `gpu` with one."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.runtime.interpreter as interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        """NumPy 2.4 no longer turns an array of one element into an int, which Triton 3.6 asks of a loop's bounds."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding):
        """Triton 3.6 loses the carry where rounding to e4m3 reaches the next power of two."""
        if (source.name, target.name) != ("fp32", "fp8e4nv"):
            return convert(data, source, target, rounding)
        return torch.from_numpy(data.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert_float


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        for item in items:
            if item.path.stem.endswith("_kernel"):
                item.add_marker(pytest.mark.gpu)
