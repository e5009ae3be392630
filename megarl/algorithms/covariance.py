"""The covariance that drains a policy's entropy, token by token, for the losses `clip_cov` and `kl_cov`.

Source: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4.
"""

from torch import Tensor

from megarl.algorithms.masked import masked


def token_covariances(
    log_probs: Tensor, advantages: Tensor, mask: Tensor, *, mean_log_prob: float, mean_advantage: float
) -> Tensor:
    """Return each token's share of the covariance between log-probability and advantage.

    `(log_probs - mean(log_probs)) * (A - mean(A))`. A large positive share, of a likely token that did well, makes the
    policy certain.

    Args:
        log_probs: of the tokens, of any shape.
        advantages: of the same shape.
        mask: of the same shape, bool.
        mean_log_prob: over all unmasked tokens of the mini-batch.
        mean_advantage: the same of the advantages.

    Returns:
        float64 of the same shape, zero under the mask.
    """
    product = (masked(log_probs, mask).double() - mean_log_prob) * (masked(advantages, mask).double() - mean_advantage)
    return masked(product, mask)
