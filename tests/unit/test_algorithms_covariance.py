import torch

from megarl.algorithms.covariance import token_covariances

NAN = float("nan")
MASK = torch.tensor([[True, True, False], [True, True, True]])
LOG_PROBS = torch.tensor([[-1.0, -3.0, NAN], [-2.0, -1.0, -3.0]])  # mean -2
ADVANTAGES = torch.tensor([[4.0, -2.0, NAN], [0.0, -1.0, -1.0]])  # mean 0
COVARIANCES = torch.tensor([[4.0, 2.0, 0.0], [0.0, -1.0, 1.0]], dtype=torch.float64)


def test_covariances_by_hand() -> None:
    found = token_covariances(LOG_PROBS, ADVANTAGES, MASK, mean_log_prob=-2.0, mean_advantage=0.0)
    torch.testing.assert_close(found, COVARIANCES)
