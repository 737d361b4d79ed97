"""Triton's interpreter on a NumPy newer than itself."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.runtime.interpreter as interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        """NumPy 2.4 no longer turns an array of one element into an int, which Triton 3.6 asks of a loop's bounds."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
