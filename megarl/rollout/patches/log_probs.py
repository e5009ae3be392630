"""The log-probabilities of drawn tokens, which vLLM keeps in lists of Python numbers."""

from typing import TYPE_CHECKING, Any

from megarl.batch import float32, int32
from megarl.platform.patching import replace
from megarl.rollout.patches.releases import declare_vllm

if TYPE_CHECKING:
    from vllm.logprobs import Logprob

UPDATE = declare_vllm(
    "vllm.v1.engine.logprobs:LogprobsProcessor",
    "_update_sample_logprobs",
    reason="six lists of Python numbers have 171 bytes for each token, and take ten times as long to read as arrays",
    upstream="vllm/logprobs.py: FlatLogprobs",
    until="FlatLogprobs has arrays",
)


class DrawnTokens:
    """The drawn tokens of a request and their log-probabilities, in place of vLLM's FlatLogprobs."""

    def __init__(self) -> None:
        self.token_ids = int32()
        self.logprobs = float32()

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, place: int) -> "dict[int, Logprob]":
        """Return the log-probability of a token by the token, as FlatLogprobs does."""
        from vllm.logprobs import Logprob

        return {self.token_ids[place]: Logprob(self.logprobs[place])}


def keep_log_probs_in_arrays() -> None:
    """Keep the log-probabilities of requests in `DrawnTokens` if only those of drawn tokens are asked for."""

    def update(processor: Any, found: Any) -> None:
        if processor.num_logprobs:
            UPDATE.original("_update_sample_logprobs")(processor, found)
            return
        if not processor.logprobs:
            processor.logprobs = DrawnTokens()
        token_ids, log_probs, *_ = found  # a row for each token, with the drawn token first
        processor.logprobs.token_ids.extend([row[0] for row in token_ids])
        processor.logprobs.logprobs.extend([row[0] for row in log_probs])

    replace(UPDATE, _update_sample_logprobs=update)
