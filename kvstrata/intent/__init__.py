"""The residual head of policy intentkv: what it learns from, and its training."""
