"""What engines generated, as the record that the rest of a step works with."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megarl.batch import Prompts, Rollouts
from megarl.rollout.sampling import Generation


def as_rollouts(prompts: Prompts, groups: Sequence[int], generations: Sequence[Generation]) -> Rollouts:
    """The record of generated samples; `groups[i]` is the prompt that sample `i` answers."""
    responses = [torch.tensor(generation.token_ids) for generation in generations]
    lengths = torch.tensor([len(response) for response in responses])
    padded = pad_sequence(responses, batch_first=True)
    return prompts.extend(
        Rollouts,
        groups=torch.tensor(groups),
        responses=padded,
        mask=torch.arange(padded.shape[1]) < lengths[:, None],
        rollout_log_probs=_log_probs(generations),
        truncated=torch.tensor([generation.truncated for generation in generations]),
    )


def _log_probs(generations: Sequence[Generation]) -> Tensor | None:
    told = [torch.tensor(generation.log_probs) for generation in generations if generation.log_probs is not None]
    return pad_sequence(told, batch_first=True) if len(told) == len(generations) else None
