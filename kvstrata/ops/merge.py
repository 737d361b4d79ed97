"""Merging partial attention by log-sum-exp (FlashInfer's merge_state algebra: associative, commutative, -inf is its zero)."""

import torch
from torch import Tensor


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine partial attention. outs [P, T, H, D], lses [P, T, H] (natural log, float32) -> out [T, H, D], lse [T, H].

    A part without a live token has lse -inf and any finite or NaN out; where all parts have, out is 0 and lse -inf. A part whose lse is
    NaN makes both NaN.
    """
    lse = torch.logsumexp(lses, 0)
    weight = torch.exp(lses - torch.where(torch.isinf(lse), 0.0, lse))
    out = torch.where(weight[..., None] == 0, 0.0, outs.float() * weight[..., None]).sum(0)
    return out.to(outs.dtype), lse
