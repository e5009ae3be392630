"""Small hand-made records: tokens count up, so that each is recognised wherever it turns up."""

from collections.abc import Sequence

import torch

from megarl.batch import Prompt, Prompts, Rollouts


def prompts(lengths: Sequence[int]) -> Prompts:
    """Prompts of the given lengths: the tokens of prompt `i` are `100 * (i + 1)` and what follows."""
    return Prompts(
        prompts=[
            Prompt(
                index=number,
                token_ids=[100 * (number + 1) + place for place in range(length)],
                text="",
                data_source="countdown",
                ground_truth=None,
                extra_info={},
            )
            for number, length in enumerate(lengths)
        ]
    )


def answer(asked: Prompts, lengths: Sequence[int], *, version: int = 0) -> Rollouts:
    """Equally many responses to each prompt, of the given lengths; those of sample `i` count up from `10 * (i + 1)`.

    `version` is that of the weights that drew them.
    """
    per_prompt = len(lengths) // len(asked.prompts)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = 10 * (torch.arange(len(lengths))[:, None] + 1) + torch.arange(max(lengths))
    return asked.extend(
        Rollouts,
        groups=torch.arange(len(asked.prompts)).repeat_interleave(per_prompt),
        responses=tokens * mask,
        mask=mask,
        rollout_log_probs=-1.0 * mask,
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        weight_versions=torch.full((len(lengths),), version),
    )
