"""From the final hidden states of a micro-batch to the outputs of a policy or a value model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from megarl.algorithms.kl import Divergence
from megarl.algorithms.losses import PolicyOutputs
from megarl.learner.heads import vocab_parallel_divergence, vocab_parallel_log_probs
from megarl.learner.packed import Packed
from megarl.learner.parallel import Mesh
from megarl.models.architecture import Architecture
from megarl.platform.device import to_device, to_host


@dataclass(frozen=True, kw_only=True)
class LogitFactors:
    """The two factors of a policy's logits on one micro-batch, and the exact divergence that is taken from it."""

    divergence: Divergence
    hidden: Tensor  # [R, hidden_size] final hidden states that predict a response token; on the host
    weight: Tensor  # [rows, hidden_size] this rank's slice of the output embedding; on the device


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """The computation behind a model's last layer."""

    module: GPTModel  # the model's last chunk on this rank
    architecture: Architecture
    mesh: Mesh
    temperature: float

    @property
    def is_policy(self) -> bool:
        """True if the model reports log-probabilities, False if values."""
        return not self.architecture.scalar_head

    def num_outputs(self, *, with_entropy: bool, with_kl: bool) -> int:
        """Return K, the outputs of the head for every response token."""
        return 1 + with_entropy + with_kl if self.is_policy else 1

    def token_outputs(
        self,
        hidden: Tensor,
        *,
        packed: Packed,
        other: LogitFactors | None,
        with_entropy: bool,
        temperature: float | None = None,
    ) -> Tensor:
        """Return [K, b, T] outputs of a micro-batch, equal on the ranks that share it.

        Args:
            hidden: [1, N, hidden_size] final hidden states.
            packed: the micro-batch.
            other: the policy that an exact divergence is taken from, if any.
            with_entropy: whether a policy reports entropies too.
            temperature: divides the logits; None: the temperature of the model.
        """
        states = self._states(hidden, packed)
        weight = self._weight()
        if not self.is_policy:
            values = torch.nn.functional.linear(states.float(), weight.float())[:, 0]
            return self._whole(packed.unpack(values)[None])
        softmax: dict[str, Any] = {
            "temperature": temperature or self.temperature,
            "vocab_size": self.architecture.vocab_size,
            "group": self.mesh.tp_group,
        }
        log_probs, entropy = vocab_parallel_log_probs(
            states, weight, packed.targets, with_entropy=with_entropy, **softmax
        )
        outputs = [log_probs] if entropy is None else [log_probs, entropy]
        if other:
            there = to_device(other.hidden, states.device)
            outputs.append(vocab_parallel_divergence(states, weight, there, other.weight, other.divergence, **softmax))
        return self._whole(torch.stack([packed.unpack(output) for output in outputs]))

    def as_outputs(self, outputs: Sequence[Tensor] | Tensor, *, with_entropy: bool) -> Any:
        """Return K tensors as an objective takes them: `PolicyOutputs` of a policy, one tensor of a value model."""
        if not self.is_policy:
            return outputs[0]
        log_probs, *others = outputs
        entropy = others.pop(0) if with_entropy else None
        return PolicyOutputs(log_probs=log_probs, entropy=entropy, kl=others[0] if others else None)

    def logit_factors(self, hidden: Tensor, *, packed: Packed, divergence: Divergence) -> LogitFactors:
        """Keep of [1, N, hidden_size] hidden states what another policy needs for its divergence from this policy."""
        # The weight is not copied: this storage stays on the device when the model's parameters are offloaded.
        states = to_host(self._states(hidden, packed))
        weight = self._weight().detach()
        return LogitFactors(divergence=divergence, hidden=states, weight=weight)

    def _states(self, hidden: Tensor, packed: Packed) -> Tensor:
        """Return [R, hidden_size] states that predict a response token, equal on all tensor-parallel ranks."""
        states = hidden[0]
        if self.module.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=self.is_policy)
        elif self.is_policy:
            states = copy_to_tensor_model_parallel_region(states)
        return states[packed.predictors]

    def _weight(self) -> Tensor:
        """Return [rows, hidden_size], this rank's slice of a policy's output embedding, or a value head's weight."""
        tied = self.is_policy and self.module.share_embeddings_and_output_weights
        weight: Tensor = self.module.shared_embedding_or_output_weight() if tied else self.module.output_layer.weight
        return weight

    def _whole(self, outputs: Tensor) -> Tensor:
        """Sum over the context-parallel ranks; the gradient of each rank stays that of its own tokens."""
        if self.mesh.cp_size == 1:
            return outputs
        whole: Tensor = reduce_from_tensor_model_parallel_region(outputs, group=self.mesh.cp_group)
        return whole
