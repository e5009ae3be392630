"""What several answers to one prompt say together: their mean, their spread, the best of some, the most frequent one.

Scores are `[P, N]`: `N` answers, drawn independently of each other, to each of `P` prompts.
"""

from collections import Counter
from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor


def best_of(scores: Tensor, k: int) -> Tensor:
    """[P] float64: the expected best score of `k` of the `N` answers, drawn without putting any back.

    With the scores of a prompt in ascending order, s_i is the best of C(i - 1, k - 1) of the C(N, k) draws:

        sum over i = k .. N of  C(i - 1, k - 1) / C(N, k) * s_i

    which is an unbiased estimate of the expected best of `k` new answers. Where scores are 0 and 1 it is pass@k, eq. 1
    of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv 2107.03374; for any scores see Walder
    and Karkhanis 2025, "Pass@K Policy Optimization", arXiv 2505.15201.
    """
    num = scores.shape[1]
    weights = torch.tensor([comb(below, k - 1) / comb(num, k) for below in range(num)], dtype=torch.float64)
    return scores.double().sort(-1).values @ weights


def majority(answers: Sequence[str], scores: Sequence[float]) -> float:
    """The score of the most frequent answer to a prompt; of several equally frequent ones the mean, as one is drawn.

    Wang et al. 2023, "Self-Consistency Improves Chain of Thought Reasoning in Language Models", arXiv 2203.11171. An
    answer's score is the mean over the responses that give it. A response without an answer ('') has no vote, unless
    none has one.
    """
    votes = Counter(filter(None, answers)) or Counter(answers)
    most = max(votes.values())
    # equally frequent answers: the mean over their responses is the mean of their means
    won = [score for answer, score in zip(answers, scores, strict=True) if votes[answer] == most]
    return sum(won) / len(won)


def statistics(scores: Tensor, answers: Sequence[str] | None) -> dict[str, float]:
    """Means over the prompts of what their answers say together, where there are at least two to each.

    Args:
        scores: `[P, N]`.
        answers: `P * N` of them, prompt by prompt; None where nobody can tell the answer of a response.

    Returns:
        `mean@N`; `std@N`, the deviation among the answers to a prompt (with N - 1); `best@K/mean` for K = 2, 4, ... and
        N; and, with answers, `maj@N`.
    """
    num = scores.shape[1]
    if num == 1:
        return {}
    found = {f"mean@{num}": float(scores.double().mean()), f"std@{num}": float(scores.double().std(-1).mean())}
    powers = [2**exponent for exponent in range(1, num.bit_length())]
    for k in sorted({*powers, num}):
        found[f"best@{k}/mean"] = float(best_of(scores, k).mean())
    if answers is not None:
        places = range(0, len(answers), num)
        won = [majority(answers[place : place + num], scores[place // num].tolist()) for place in places]
        found[f"maj@{num}"] = sum(won) / len(won)
    return found
