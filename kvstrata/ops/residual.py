"""IntentKV's residual head: what a rule's score of a token lacks, learned from the attention that later turns really paid.

The paper (Li, Lou and Li 2026) gives the shape: cross-attention over the current query's K-vectors with features of each token, zero at
first, added to the rule's score. Features, sizes and loss are ours (docs/intentkv.md). Knows nothing of models, stores or training.
"""

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import layer_norm, one_hot

AGES, ROLES = 4, 7
NUM_FEATURES = 7 + AGES + ROLES
"""Of `features`."""
LEAST = 1e-9
"""Attention below this is none."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """num_layers, num_kv_heads, head_dim: of the model that the head is for. rank: of projected K-vectors; hidden: of the perceptron."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    rank: int = 16
    hidden: int = 32

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of a residual head is {value!r}; it must be at least 1")


def features(rule: Tensor, linear: Tensor, received: Tensor, keys: Tensor, age: Tensor, role: Tensor) -> Tensor:
    """What the head knows of each token: rule, linear, received float32 [H, n], the rule's score, the mean remembered query times the key,
    and the attention received so far; keys [n, H, D]; age, role int64 [n], codes as policy/tags.py has them. -> float32 [H, n, F]."""
    n = rule.shape[-1]
    place = torch.arange(n, device=rule.device, dtype=torch.float32)
    distance = torch.log2(n - place) / 8
    since = received / (n - place)
    norm = keys.float().norm(dim=-1).T
    columns = [
        _log(rule), rule.argsort(-1).argsort(-1) / max(n, 1), _standard(linear), _log(received), _log(since),
        _standard(norm), distance.expand_as(rule),
    ]  # fmt: skip
    tags = torch.cat([one_hot(age.clamp(0, AGES - 1), AGES), one_hot(role.clamp(0, ROLES - 1), ROLES)], -1).float()
    return torch.cat([torch.stack(columns, -1), tags.expand(len(rule), -1, -1)], -1)


def _log(x: Tensor) -> Tensor:
    return (torch.log10(x.clamp(min=LEAST)) + 4) / 2


def _standard(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True).clamp(min=1e-6) if x.shape[-1] > 1 else torch.zeros_like(x)


def log_score(rule: Tensor) -> Tensor:
    """The rule's score as the head's correction is added to it."""
    return torch.log(rule.clamp(min=LEAST))


class ResidualHead(nn.Module):
    """A new head answers 0 for everything: it changes nothing until it is trained."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = c = config
        shape = (c.num_layers, c.num_kv_heads, c.head_dim, c.rank)
        self.token, self.ask, self.value = (nn.Parameter(torch.randn(shape) * c.head_dim**-0.5) for _ in range(3))
        self.place = nn.Parameter(torch.randn(c.num_layers, c.num_kv_heads, 8) * 0.1)
        self.inner = nn.Linear(NUM_FEATURES + 2 * c.rank + 8, c.hidden)
        self.outer = nn.Linear(c.hidden, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, layer: int, known: Tensor, keys: Tensor, asks: Tensor) -> Tensor:
        """known [H, n, F] (`features`), keys [n, H, D] of the tokens, asks [A, H, D] of the current query, A above 0 -> float32 [H, n]."""
        shape = (self.config.head_dim,)
        k, a = (layer_norm(x.float(), shape).transpose(0, 1) for x in (keys, asks))
        token = k @ self.token[layer]
        weights = torch.softmax(token @ (a @ self.ask[layer]).transpose(1, 2) * self.config.rank**-0.5, -1)
        context = weights @ (a @ self.value[layer])
        place = self.place[layer][:, None].expand(-1, known.shape[1], -1)
        hidden = nn.functional.gelu(self.inner(torch.cat([known, context, token * context, place], -1)))
        return self.outer(hidden)[..., 0]

    def save(self, path: Path | str, **about: object) -> None:
        """Write the head with its geometry, and what it was trained on."""
        tensors = {name: p.detach().half().contiguous() for name, p in self.state_dict().items()}
        save_file(tensors, path, {"config": json.dumps(asdict(self.config)), "about": json.dumps(about)})

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Raises ValueError, naming the file and what is wrong, for anything that `save` did not write."""
        try:
            with safe_open(str(path), "pt") as file:
                metadata = file.metadata() or {}
                head = cls(HeadConfig(**json.loads(metadata["config"])))
                names = list(file.keys())
                head.load_state_dict({name: file.get_tensor(name).float() for name in names})
        except (OSError, SafetensorError, KeyError, TypeError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path} is no residual head: {error}") from error
        if not all(p.isfinite().all() for p in head.parameters()):
            raise ValueError(f"{path} is no residual head: its weights are not finite")
        return head.eval().requires_grad_(False)


@lru_cache(maxsize=4)
def _loaded(path: str, written: int, size: int) -> ResidualHead:
    return ResidualHead.load(path)


def load_head(path: str) -> ResidualHead:
    """A head of a file, read again only when the file has changed. Raises ValueError where there is none."""
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise ValueError(f"{path} is no residual head: {error}") from error
    return _loaded(path, stat.st_mtime_ns, stat.st_size)
