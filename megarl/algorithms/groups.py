"""Statistics over the responses to one prompt: mean, spread, the best of some, the score of the most frequent answer.

The responses to a prompt are independent samples. Prompts may have different numbers of scored responses, because a
reward may fail.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import groupby
from math import comb

import torch
from torch import Tensor


def best_of(scores: Tensor, k: int) -> Tensor:
    """Return `[P]` float64: the expected best score of `k` of the `N` responses, drawn without replacement.

    `scores` are `[P, N]`. With the scores of a prompt in ascending order, s_i is the best of C(i - 1, k - 1) of the
    C(N, k) draws:

        sum over i = k .. N of  C(i - 1, k - 1) / C(N, k) * s_i

    an unbiased estimate of the expected best of `k` new responses. If scores are 0 and 1 it is pass@k, eq. 1
    of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv 2107.03374; for any scores see Walder
    and Karkhanis 2025, "Pass@K Policy Optimization", arXiv 2505.15201.
    """
    num = scores.shape[1]
    weights = torch.tensor([comb(below, k - 1) / comb(num, k) for below in range(num)], dtype=torch.float64)
    return scores.double().sort(-1).values @ weights


def majority(answers: Sequence[Hashable], scores: Sequence[float]) -> float:
    """Return the score of the most frequent answer to a prompt; the mean score of equally frequent answers.

    Wang et al. 2023, "Self-Consistency Improves Chain of Thought Reasoning in Language Models", arXiv 2203.11171. An
    answer's score is the mean over the responses that give it. A response without an answer ('' or 0) has no vote,
    unless no response has an answer.
    """
    votes = Counter(filter(None, answers)) or Counter(answers)
    most = max(votes.values())
    # equally frequent answers: the mean over their responses is the mean of their means
    won = [score for answer, score in zip(answers, scores, strict=True) if votes[answer] == most]
    return sum(won) / len(won)


def mean_over_prompts(scores: Sequence[Tensor]) -> float:
    """Return the mean over prompts of their mean scores; one tensor for each prompt."""
    return float(torch.stack([of_prompt.double().mean() for of_prompt in scores]).mean())


def statistics(scores: Sequence[Tensor], answers: Sequence[Sequence[Hashable]] | None, *, num: int) -> dict[str, float]:
    """Return means over the prompts of the statistics of their responses; nothing if a prompt has one response.

    Args:
        scores: for each prompt the scores of its scored responses, `[1]` to `[N]`.
        answers: the final answers in the same responses, or what is equal if they are; None if no reward can extract
            them.
        num: `N`, the number of responses to each prompt.

    Returns:
        `mean@N`; `std@N`, the unbiased standard deviation among the responses to a prompt; `best@K/mean` for K = 2,
        4, ... and N, over the prompts that have K scores; and, with answers, `maj@N`. A statistic is left out if no
        prompt has enough scores.
    """
    if num == 1:
        return {}
    by_count = [torch.stack(list(rows)) for _, rows in groupby(sorted(scores, key=len), key=len)]
    found = {f"mean@{num}": mean_over_prompts(scores)}
    spreads = [rows.double().std(-1) for rows in by_count if rows.shape[1] > 1]
    if spreads:
        found[f"std@{num}"] = float(torch.cat(spreads).mean())
    powers = [2**exponent for exponent in range(1, num.bit_length())]
    for k in sorted({*powers, num}):
        bests = [best_of(rows, k) for rows in by_count if rows.shape[1] >= k]
        if bests:
            found[f"best@{k}/mean"] = float(torch.cat(bests).mean())
    if answers is not None:
        won = [majority(votes, of_prompt.tolist()) for votes, of_prompt in zip(answers, scores, strict=True)]
        found[f"maj@{num}"] = sum(won) / len(won)
    return found
