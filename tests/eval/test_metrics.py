import numpy as np
import pytest
import torch
from torch import Tensor

from kvstrata.eval.metrics import ROWS, Comparison, Scores, empty, join, log_probs


def compare(reference: Tensor | None, ours: Tensor, targets: list[int], calls: list[bool] | None = None, pieces: int = 3) -> Scores:
    n = len(targets)
    rows = log_probs(reference) if reference is not None else None
    comparison = Comparison(rows, list(range(n)), targets, calls or [False] * n, [i // 4 for i in range(n)])
    for part in ours.tensor_split(pieces):
        comparison.add(part)
    return comparison.scores()


@pytest.mark.parametrize("n", [1, ROWS, 2 * ROWS + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_are_the_definitions(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    a, b = torch.randn(n, 97).to(dtype), torch.randn(n, 97).to(dtype)
    targets = torch.randint(97, (n,))
    scores = compare(a, b, targets.tolist(), pieces=min(n, 3))
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    np.testing.assert_allclose(scores.kl, (p * (p / q).log()).sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(scores.agree, a.argmax(-1) == b.argmax(-1))
    np.testing.assert_array_equal(scores.hit, b.argmax(-1) == targets)
    rows = torch.arange(n)
    np.testing.assert_allclose(scores.nll, -q[rows, targets].log(), rtol=1e-5)
    assert scores.nll_delta == pytest.approx(float((p[rows, targets].log() - q[rows, targets].log()).mean()), abs=1e-5)
    assert scores.kl_p95 == pytest.approx(float(np.percentile(scores.kl, 95)))


def test_equal_logits_lose_nothing() -> None:
    a = torch.randn(40, 1000) * 5
    scores = compare(a, a.clone(), [1] * 40)
    assert abs(scores.kl_mean) < 1e-6
    assert scores.top1 == 1
    assert scores.nll_delta == 0


def test_tool_call_tokens_are_judged_alone_and_calls_as_wholes() -> None:
    reference = torch.eye(8)[[0, 1, 2, 3, 4, 5, 6, 7]] * 9
    ours = reference.clone()
    ours[5] = ours[6]
    calls = [False, True, True, True, True, True, False, False]
    scores = compare(reference, ours, list(range(8)), calls)
    assert scores.top1 == 7 / 8
    assert scores.tool_calls.top1 == 4 / 5
    assert scores.tool_calls.kl_mean == pytest.approx(scores.kl.sum() / 5)
    # groups of four tokens: the first call is whole, the second lost a token
    assert scores.calls_kept == (1, 2)


def test_joined_conversations_keep_their_calls_apart() -> None:
    a = torch.eye(4) * 9
    one = compare(a, a, [0, 1, 2, 3], [True] * 4)
    both = join([one, one])
    assert len(both) == 8
    assert both.calls_kept == (2, 2)


def test_nothing_scored_is_not_a_number_and_no_error() -> None:
    for scores in (empty(), join([])):
        assert np.isnan([scores.kl_mean, scores.kl_p95, scores.top1, scores.nll_delta]).all()
        assert scores.calls_kept == (0, 0)


def test_without_a_reference_only_the_text_is_judged() -> None:
    ours = torch.randn(5, 11)
    scores = compare(None, ours, [3] * 5)
    assert np.isnan(scores.kl_mean)
    assert not scores.agree.any()
    np.testing.assert_allclose(scores.nll, -log_probs(ours)[:, 3], rtol=1e-6)


def test_missing_logits_are_an_error() -> None:
    comparison = Comparison(torch.zeros(3, 5), [0, 1, 2], [0, 0, 0], [False] * 3, [0] * 3)
    comparison.add(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="2 of 3 scored tokens"):
        comparison.scores()
