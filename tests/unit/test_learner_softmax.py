"""The sums over logits and the gradient of the logits, by operations of torch."""

from functools import partial

import torch

from megarl.learner import softmax
from tests.support.interpreted import logits_and_targets


def test_sums_of_a_row_by_hand() -> None:
    row, target = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([2])
    small, middle = torch.tensor([-2.0, -1.0]).exp()
    expected = torch.stack([torch.tensor(2.0), torch.tensor(1.0), 1 + small + middle, 2 + middle])
    torch.testing.assert_close(softmax.moments(row, target, with_entropy=True)[:, 0], expected)
    torch.testing.assert_close(softmax.moments(row, target, with_entropy=False)[:, 0], expected[:3])


def test_slice_moments_merge_into_full_row_moments() -> None:
    logits, targets = logits_and_targets()
    moments = partial(softmax.moments, with_entropy=True)
    whole = moments(logits, targets)
    parts = [moments(logits[:, first : first + 8], targets - first) for first in (0, 8, 16)]
    maximum = torch.stack([part[0] for part in parts]).amax(0)
    merged = torch.stack([softmax.merge(part, maximum) for part in parts]).sum(0)
    torch.testing.assert_close(merged, whole[1:])
    assert torch.equal(maximum, whole[0])


def test_the_gradient_is_that_of_autograd() -> None:
    logits, targets = logits_and_targets()
    logits, targets = logits[[0, 4, 5]].requires_grad_(), targets[[0, 4, 5]]
    log_p = logits.log_softmax(-1)
    log_probs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    upstream = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, -3.0]])
    (torch.stack([log_probs, entropy]) * upstream).sum().backward()
    values = (logits.detach().logsumexp(-1), upstream[0], (entropy.detach(), upstream[1]))
    found = softmax.gradient(logits.detach().clone(), targets, *values, dtype=torch.float32)
    torch.testing.assert_close(found, logits.grad)
