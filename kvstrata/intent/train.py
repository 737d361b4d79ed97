"""Training a residual head: conversations are split, some to learn from, some to stop by, some to judge by; the model stays frozen.

Loss: cross entropy between a lesson's label, as a distribution over the tokens at hand, and the softmax of the rule's logarithm plus the
head's correction (ListNet, Cao et al. 2007): it rewards keeping the mass, wherever the cut falls.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvstrata.intent.lessons import Lesson
from kvstrata.ops.residual import HeadConfig, ResidualHead

SHARES = (0.5, 0.25, 0.125)
"""Of the tokens, at which what is kept of the mass is told."""
WARM_UP = 50
"""Steps until the rate is whole."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Trained:
    """head: the best by the conversations to stop by, the untrained one among the candidates. report: JSON."""

    head: ResidualHead
    report: dict[str, Any]


def split(names: Sequence[str], judges: int = 0) -> tuple[list[int], list[int], list[int]]:
    """Conversations to learn from, to stop by and to judge by, by index: the last `judges` judge, every fourth where that is 0, and every
    fourth of the others stops. Raises ValueError for fewer than three, two of one name, or fewer than two that do not judge."""
    if len(names) < 3 or len(set(names)) != len(names) or len(names) - judges < 2:
        found = f"{len(set(names))} different conversations of {len(names)}, {judges} of them to judge by"
        raise ValueError(f"{found}; 3 or more, all different, are needed: some to learn from, some to stop by, some to judge by")
    judge = list(range(len(names) - judges, len(names))) if judges else list(range(2, len(names), 4))
    others = [i for i in range(len(names)) if i not in judge]
    stop = others[1::4]
    return [i for i in others if i not in stop], stop, judge


def scores(head: ResidualHead | None, lesson: Lesson) -> Tensor:
    """float32 [L, H, m]: the rule alone, or with the head."""
    rule = lesson.rule.float()
    if head is None:
        return rule
    every = slice(None)
    return rule + head(every, lesson.known.float(), head.worth(every, lesson.own), lesson.keys, lesson.asks)


def loss_of(head: ResidualHead, lesson: Lesson) -> Tensor:
    wanted = lesson.label / lesson.label.sum(-1, keepdim=True).clamp(min=1e-9)
    return -(wanted * torch.log_softmax(scores(head, lesson), -1)).sum(-1).mean()


def standardize(head: ResidualHead, material: Sequence[Lesson]) -> None:
    """Set what the head takes off and divides by, from the tokens of the lessons."""
    for layer in range(head.config.num_layers):
        own = torch.cat([lesson.own[layer] for lesson in material]).float()
        head.mean[layer], head.std[layer] = own.mean(0), own.std(0).clamp(min=1e-3)


@torch.inference_mode()
def mass_kept(score: Callable[[Lesson], Tensor], of: Sequence[Lesson], share: float) -> float:
    """Of the attention that later turns paid, the share that lands on the best `share` of the tokens: mean over lessons, layers, heads."""
    kept = []
    for lesson in of:
        best = score(lesson).topk(max(1, round(share * lesson.later.shape[-1])), -1).indices
        kept.append((lesson.later.gather(-1, best).sum(-1) / lesson.later.sum(-1).clamp(min=1e-9)).mean())
    return float(torch.stack(kept).mean())


def train(
    config: HeadConfig, names: Sequence[str], taught: Sequence[Sequence[Lesson]], *, judges: int = 0, epochs: int = 12,
    rate: float = 2e-3, seed: int = 0, device: torch.device | None = None, progress: Progress = lambda what, done, total: None,
) -> Trained:  # fmt: skip
    """names, taught: conversations and their lessons, which move to the device; judges: as `split` has it. On one machine the result
    depends on `seed` and nothing else."""
    device = device or torch.device("cpu")
    learn, stop, judge = split(names, judges)
    torch.manual_seed(seed)
    head, started = ResidualHead(config).to(device), time.perf_counter()
    optimizer = torch.optim.AdamW(head.parameters(), rate, weight_decay=1e-2)
    material, stopping, judging = ([x.to(device) for i in part for x in taught[i]] for part in (learn, stop, judge))
    standardize(head, material)
    steps = epochs * len(material)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0)))
    )
    best, kept = {k: v.clone() for k, v in head.state_dict().items()}, mass_kept(lambda x: scores(None, x), stopping, 0.25)
    history = [kept]
    for epoch in range(epochs):
        progress(f"epoch {epoch + 1}", epoch, epochs)
        for i in torch.randperm(len(material)).tolist():
            optimizer.zero_grad()
            loss_of(head, material[i]).backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        history.append(mass_kept(lambda x: scores(head, x), stopping, 0.25))
        if history[-1] > kept:
            best, kept = {k: v.clone() for k, v in head.state_dict().items()}, history[-1]
    progress("done", epochs, epochs)
    head.load_state_dict(best)
    head.eval()
    ways: dict[str, Callable[[Lesson], Tensor]] = {
        "rule": lambda x: scores(None, x), "rule + residual": lambda x: scores(head, x),
        "newest": lambda x: -x.known[..., 4].float(), "oracle": lambda x: x.later,
    }  # fmt: skip
    report = {
        "learned_from": [names[i] for i in learn], "stopped_by": [names[i] for i in stop], "judged_by": [names[i] for i in judge],
        "lessons": len(material), "epochs": epochs, "seed": seed, "seconds": round(time.perf_counter() - started, 1),
        "stopping": [round(x, 4) for x in history],
        "mass_kept": {name: {f"{share:g}": round(mass_kept(way, judging, share), 4) for share in SHARES} for name, way in ways.items()},
    }  # fmt: skip
    return Trained(head.cpu(), report)
