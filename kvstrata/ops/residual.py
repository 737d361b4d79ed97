"""IntentKV's residual head: what a rule's score of a token lacks, learned from the attention that later turns really paid.

The paper (Li, Lou and Li 2026) gives the shape: cross-attention over the current query's K-vectors with features of each token, zero at
first, added to the rule's score. Features, sizes and loss are ours, and so is what turned out to matter most: a token's own query, key
and value, seen once, when it is stored (docs/intentkv.md). Knows nothing of models, stores or training.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, one_hot

from kvstrata.ops.rotary import moved

AGES, ROLES = 4, 7
NUM_FEATURES, NUM_RECEIVED = 5 + AGES + ROLES, 2
"""Of `features`, and how many more there are where it is known what attention tokens received."""
LEAST = 1e-9
"""Attention below this is none."""
WIDEST = 6.0
"""Standard deviations beyond which a channel of `at_rest` is cut: outlier channels would drown the rest."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """num_layers, num_heads, num_kv_heads, head_dim: of the model that the head is for. width: of the perceptron that looks at a token when
    it is stored; hidden: of the one that looks at its features; rank: of projected K-vectors, 0 for no look at the current query;
    received: whether the attention that a token received so far is among its features."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int = 32
    hidden: int = 16
    rank: int = 0
    received: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.received, bool):
            raise ValueError(f"received of a residual head is {self.received!r}; accepted: True, False")
        for name, value in asdict(self).items():
            if name == "received":
                continue
            least = int(name != "rank")
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} of a residual head is {value!r}; it must be at least {least}")

    @property
    def num_features(self) -> int:
        """How many of `features` the head looks at."""
        return NUM_FEATURES + NUM_RECEIVED * self.received

    @property
    def channels(self) -> int:
        """Of `at_rest`."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def at_rest(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, inv_freq: Tensor | None) -> Tensor:
    """What tokens are, wherever they stand: their queries and keys with RoPE taken off, and their values.

    q [N, Hq, D], k, v [N, H, D], of positions [N]; inv_freq: as `moved` takes it, None where there is no RoPE. -> float32 [N, channels].
    """
    if inv_freq is not None:
        q, k = (moved(x, -positions, inv_freq) for x in (q, k))
    return torch.cat([x.flatten(1).float() for x in (q, k, v)], -1)


def features(rule: Tensor, linear: Tensor, keys: Tensor, age: Tensor, role: Tensor, received: Tensor | None = None) -> Tensor:
    """What the head knows of each token besides: rule, linear float32 [H, n], the rule's score and the mean remembered query times the key;
    keys [n, H, D]; age, role int64 [n], codes as policy/tags.py has them; received float32 [H, n], the attention that queries so far have
    paid, summed, 0 where it is not known, last among the features. -> float32 [H, n, F]."""
    n = rule.shape[-1]
    place = torch.arange(n, device=rule.device, dtype=torch.float32)
    distance = torch.log2(n - place) / 8
    norm = keys.float().norm(dim=-1).T
    columns = [
        (log_score(rule) / LOG10 + 4) / 2, rule.argsort(-1).argsort(-1) / max(n, 1), _standard(linear), _standard(norm),
        distance.expand_as(rule),
    ]  # fmt: skip
    tags = torch.cat([one_hot(age.clamp(0, AGES - 1), AGES), one_hot(role.clamp(0, ROLES - 1), ROLES)], -1).float()
    known = torch.cat([torch.stack(columns, -1), tags.expand(len(rule), -1, -1)], -1)
    return known if received is None else torch.cat([known, _received(received, n - place)], -1)


def _received(received: Tensor, since: Tensor) -> Tensor:
    """float32 [H, n, NUM_RECEIVED] of attention received in `since` steps: how much a step, and its rank; the mean where not known."""
    paid = torch.log10(torch.where(received > 0, received / since, torch.nan))
    paid = torch.where(paid.isnan(), paid.nanmean(-1, keepdim=True).nan_to_num(-4.0), paid)
    return torch.stack([(paid + 4) / 2, paid.argsort(-1).argsort(-1) / max(len(since), 1)], -1)


LOG10 = 2.302585092994046


def _standard(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True).clamp(min=1e-6) if x.shape[-1] > 1 else torch.zeros_like(x)


def log_score(rule: Tensor) -> Tensor:
    """The rule's score as the head's correction is added to it."""
    return torch.log(rule.clamp(min=LEAST))


class ResidualHead(nn.Module):
    """A new head answers 0 for everything: it changes nothing until it is trained."""

    mean: Tensor
    std: Tensor
    digest: bytes = b""
    """Of a file's weights."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = c = config
        seen = c.num_features + 1 + 2 * c.rank

        def drawn(*shape: int, fan_in: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape) * fan_in**-0.5)

        # of what is seen when a token is stored: mean and deviation of the conversations that were learned from
        self.register_buffer("mean", torch.zeros(c.num_layers, c.channels))
        self.register_buffer("std", torch.ones(c.num_layers, c.channels))
        self.look = drawn(c.num_layers, c.channels, c.width, fan_in=c.channels)
        self.look_bias = nn.Parameter(torch.zeros(c.num_layers, c.width))
        self.tell = drawn(c.num_layers, c.width, c.num_kv_heads, fan_in=c.width)
        shape = (c.num_layers, c.num_kv_heads, c.head_dim, c.rank)
        self.token, self.ask, self.value = (drawn(*shape, fan_in=c.head_dim) for _ in range(3))
        self.inner = drawn(c.num_layers, c.num_kv_heads, seen, c.hidden, fan_in=seen)
        self.inner_bias = nn.Parameter(torch.zeros(c.num_layers, c.num_kv_heads, 1, c.hidden))
        self.outer = nn.Parameter(torch.zeros(c.num_layers, c.num_kv_heads, c.hidden, 1))
        self.straight = nn.Parameter(torch.zeros(c.num_layers, c.num_kv_heads, seen, 1))

    def worth(self, layer: int | slice, own: Tensor) -> Tensor:
        """A number for each KV head, of what tokens are alone: own [N, channels] (`at_rest`) -> float32 [H, N]. A slice of layers: all
        with that dimension before them, here and below."""
        x = ((own.float() - self.mean[layer].unsqueeze(-2)) / self.std[layer].unsqueeze(-2)).clamp(-WIDEST, WIDEST)
        return (gelu(x @ self.look[layer] + self.look_bias[layer].unsqueeze(-2)) @ self.tell[layer]).mT

    def forward(self, layer: int | slice, known: Tensor, worth: Tensor, keys: Tensor, asks: Tensor) -> Tensor:
        """known [H, n, F] (`features`; what the head does not look at is left out), worth [H, n], keys [n, H, D] of the tokens,
        asks [A, H, D] of the current query, A above 0 -> float32 [H, n]."""
        seen = [known[..., : self.config.num_features], worth.float()[..., None]]
        if self.config.rank:
            shape = (self.config.head_dim,)
            k, a = (layer_norm(x.float(), shape).transpose(-3, -2) for x in (keys, asks))
            token = k @ self.token[layer]
            weights = torch.softmax(token @ (a @ self.ask[layer]).mT * self.config.rank**-0.5, -1)
            context = weights @ (a @ self.value[layer])
            seen += [context, token * context]
        x = torch.cat(seen, -1)
        hidden = gelu(x @ self.inner[layer] + self.inner_bias[layer])
        return (hidden @ self.outer[layer] + x @ self.straight[layer])[..., 0]

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
        tensors = head.state_dict().values()
        if not all(x.isfinite().all() for x in tensors):
            raise ValueError(f"{path} is no residual head: its weights are not finite")
        if not (head.std > 0).all():
            raise ValueError(f"{path} is no residual head: it divides by a deviation of {head.std.min():g}; it must be above 0")
        head.digest = hashlib.blake2b(b"".join(x.numpy().tobytes() for x in tensors), digest_size=16).digest()
        return head.eval().requires_grad_(False)


@lru_cache(maxsize=4)
def _loaded(path: str, written: int, size: int) -> ResidualHead:
    return ResidualHead.load(path)


HEADS = Path(__file__).parents[1] / "intent" / "heads"
"""Of the heads that come with the package, each with the report of its training."""


def shipped() -> list[str]:
    """Names of the heads that come with the package."""
    return sorted(path.stem for path in HEADS.glob("*.safetensors"))


def load_head(name_or_path: str) -> ResidualHead:
    """A shipped head by its name, or one of a file, read again only when the file has changed. Raises ValueError where there is none."""
    path = HEADS / f"{name_or_path}.safetensors" if name_or_path in shipped() else Path(name_or_path)
    try:
        stat = path.stat()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name_or_path!r} is no residual head: {error}; accepted: {', '.join([*shipped(), 'a file of train-intent'])}"
        ) from error
    return _loaded(str(path), stat.st_mtime_ns, stat.st_size)
