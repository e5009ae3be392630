"""Checks that an advantage estimator or a policy loss gives every batch one result, for the tests of its author.

A result must not depend on the micro-batches and ranks that share a batch, on padding, or on the order of the samples.
Both checks try a function on random batches of ragged responses. They draw nothing from torch's global generator.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.calls import arguments_of
from megarl.algorithms.losses import PolicyLoss
from megarl.algorithms.masked import masked
from megarl.platform.errors import UserError

Loss = Callable[..., PolicyLoss]
Estimator = Callable[..., Tensor | tuple[Tensor, Tensor]]
NUM_BATCHES = 8
PADDING = 3
_COUNTS = ("clip_frac", "clip_frac_lower", "ppo_kl")


def check_policy_loss(loss: Loss, **kwargs: object) -> None:
    """Check that a policy loss, and its gradient, add up over every split of a mini-batch.

    Args:
        loss: takes some of `log_probs`, `old_log_probs`, `advantages` (`[b, T]` float32, zero outside the mask) and
            `mask` (`[b, T]` bool) as keywords.
        kwargs: further arguments of `loss`.

    Raises:
        UserError: `loss` returns no `PolicyLoss` of sums over rows, or its sums, counts or gradient depend on the
            micro-batches, on padding, or on the order of the samples.
    """
    for seed in range(NUM_BATCHES):
        draw = torch.Generator().manual_seed(seed)
        mask = _mask(draw)
        batch = {
            "log_probs": masked(-3.0 * torch.rand(mask.shape, generator=draw), mask),
            "old_log_probs": masked(-3.0 * torch.rand(mask.shape, generator=draw), mask),
            "advantages": masked(torch.randn(mask.shape, generator=draw), mask),
            "mask": mask,
        }
        whole = _parts(loss, batch, [torch.arange(len(mask))], kwargs)
        for cuts in _splits(len(mask), draw):
            sizes = ", ".join(str(len(rows)) for rows in cuts)
            _compare(loss, whole, _parts(loss, batch, cuts, kwargs), f"in micro-batches of {sizes} samples")
        padded = {name: _padded(tensor) for name, tensor in batch.items()}
        _compare(loss, whole, _parts(loss, padded, [torch.arange(len(mask))], kwargs), "with padding")


def check_estimator(estimator: Estimator, **kwargs: object) -> None:
    """Check that the results of an advantage estimator belong to the samples alone.

    An estimator always sees a complete batch, on every rank, so it may take moments of the batch. The groups of a batch
    may have different sizes: responses without a score are left out.

    Args:
        estimator: takes some of `token_rewards`, `values` (`[B, T]` float32, zero outside the mask), `scores`,
            `baselines` (`[B]` float32), `groups` (`[B]` int64) and `mask` (`[B, T]` bool) as keywords.
        kwargs: further arguments of `estimator`.

    Raises:
        UserError: `estimator` does not return `[B, T]` tensors of finite numbers, or they depend on padding, on the
            order of the samples, or on the numbers that name the groups.
    """
    for seed in range(NUM_BATCHES):
        draw = torch.Generator().manual_seed(seed)
        mask = _mask(draw)
        size = len(mask)
        rewards = masked(torch.randn(mask.shape, generator=draw), mask)
        groups = torch.randint(0, max(size // 2, 1), (size,), generator=draw)
        baselines = torch.randn(size, generator=draw)[groups]
        batch = {
            "token_rewards": rewards,
            "scores": rewards.sum(-1),
            "values": masked(torch.randn(mask.shape, generator=draw), mask),
            "groups": groups,
            "baselines": baselines,
            "mask": mask,
        }
        whole = estimates_of(estimator, batch, kwargs)
        order = torch.randperm(size, generator=draw)
        moved = {name: tensor[order] for name, tensor in batch.items()}
        renamed = batch | {"groups": groups.max() + 7 - groups}
        padded = {name: _padded(tensor) if tensor.ndim == 2 else tensor for name, tensor in batch.items()}
        for other, expected, when in (
            (moved, [one[order] for one in whole], "in another order of the samples"),
            (renamed, whole, "with other numbers for the groups"),
            (padded, [_padded(one) for one in whole], "with padding"),
        ):
            for was, now in zip(expected, estimates_of(estimator, other, kwargs), strict=True):
                _require_equal(estimator, "advantages", was, now, when)


def loss_of(loss: Loss, tensors: Mapping[str, Tensor], kwargs: Mapping[str, object]) -> PolicyLoss:
    """Call a policy loss with the `tensors` that it takes, which become zero outside the mask.

    Raises:
        UserError: it does not return a `PolicyLoss` with one sum for each sample.
    """
    result = loss(**_taken(loss, tensors), **kwargs)
    if not isinstance(result, PolicyLoss):
        raise UserError(f"{_name(loss)} returns {_kind(result)}, not a PolicyLoss: see PolicyLoss.of")
    _require_shape(loss, "sums", result.sums, (len(tensors["mask"]),))
    for name in _COUNTS:
        _require_shape(loss, name, getattr(result, name), ())
    return result


def estimates_of(estimator: Estimator, tensors: Mapping[str, Tensor], kwargs: Mapping[str, object]) -> list[Tensor]:
    """Call an estimator with the `tensors` that it takes, which become zero outside the mask.

    Returns:
        Advantages `[B, T]` float32 and, if the estimator has them, returns; zero outside the mask.

    Raises:
        UserError: it does not return one or two `[B, T]` tensors, or they are not finite within the mask.
    """
    result = estimator(**_taken(estimator, tensors), **kwargs)
    results = list(result) if isinstance(result, tuple) else [result]
    if len(results) > 2:
        raise UserError(f"{_name(estimator)} returns {len(results)} values: return advantages, or advantages, returns")
    found = []
    for name, tensor in zip(("advantages", "returns"), results, strict=False):
        _require_shape(estimator, name, tensor, tuple(tensors["mask"].shape))
        estimate = masked(tensor.to(torch.float32), tensors["mask"])
        found.append(estimate)
        if estimate.numel() and not torch.stack(torch.aminmax(estimate)).isfinite().all():  # takes no memory
            sample, token = (~estimate.isfinite()).nonzero()[0].tolist()
            raise UserError(f"{_name(estimator)}: its {name} are not all finite: see sample {sample}, token {token}")
    return found


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The results of a loss on all micro-batches of a batch, in the order of its samples."""

    sums: Tensor  # [B]
    gradient: Tensor  # [B, T] of the sum of `sums`
    counts: Tensor  # [3]


def _parts(loss: Loss, batch: Mapping[str, Tensor], cuts: list[Tensor], kwargs: Mapping[str, object]) -> _Part:
    mask = batch["mask"]
    sums = torch.zeros(len(mask))
    gradient = torch.zeros(mask.shape)
    counts = torch.zeros(len(_COUNTS))
    for rows in cuts:
        micro = {name: tensor[rows] for name, tensor in batch.items()}
        log_probs = micro["log_probs"].requires_grad_()
        result = loss_of(loss, micro, kwargs)
        if not result.sums.requires_grad:
            raise UserError(f"{_name(loss)} has no gradient: its sums must depend on log_probs")
        sums[rows] = result.sums.detach().float()
        gradient[rows] = torch.autograd.grad(result.sums.sum(), log_probs)[0]
        counts += torch.stack([getattr(result, name).detach().float() for name in _COUNTS])
    return _Part(sums=sums, gradient=gradient[:, : mask.shape[1]], counts=counts)


def _compare(loss: Loss, whole: _Part, other: _Part, when: str) -> None:
    gradient = other.gradient[:, : whole.gradient.shape[1]]
    _require_equal(loss, "sums", whole.sums, other.sums, when)
    _require_equal(loss, "gradient", whole.gradient, gradient, when)
    _require_equal(loss, "counts", whole.counts, other.counts, when)


def _require_equal(function: object, what: str, was: Tensor, now: Tensor, when: str) -> None:
    if not was.isfinite().all() or not now.isfinite().all():
        raise UserError(f"{_name(function)}: the {what} of a batch of {len(was)} samples are not all finite")
    if not torch.allclose(was, now, rtol=1e-4, atol=1e-5):
        rule = "An estimator counts no tokens outside the mask, and draws no random numbers"
        if what in ("sums", "gradient", "counts"):
            rule = "A loss sums over the tokens of each row and mixes no rows; loss_agg_mode takes the means"
        raise UserError(
            f"{_name(function)}: the {what} of a batch of {len(was)} samples differ {when}, by up to "
            f"{(was - now).abs().max().item():.3g}. {rule}"
        )


def _require_shape(function: object, what: str, value: object, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        found = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else _kind(value)
        raise UserError(f"{_name(function)}: its {what} are {found}, not a tensor of shape {list(shape)}")


def _taken(function: Callable[..., object], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors that `function` has parameters for, with zeros outside the mask."""
    mask = tensors["mask"]
    taken = arguments_of(function, tensors)
    for name, tensor in taken.items():
        has_padding = tensor.shape == mask.shape and tensor is not mask
        taken[name] = masked(tensor, mask) if has_padding else tensor.clone()
    return taken


def _mask(draw: torch.Generator) -> Tensor:
    """Draw a mask of responses: the first has a gap, the second is empty, and the others are ragged."""
    size, length = (int(torch.randint(4, 9, (), generator=draw)) for _ in range(2))
    lengths = torch.randint(1, length + 1, (size,), generator=draw)
    lengths[:2] = torch.tensor([length, 0])
    mask = torch.arange(length) < lengths[:, None]
    mask[0, 1] = False
    return mask


def _splits(size: int, draw: torch.Generator) -> Iterator[list[Tensor]]:
    """Yield the rows of micro-batches: one each, two parts, and a random order in parts of three."""
    rows = torch.arange(size)
    yield list(rows.split(1))
    yield list(rows.split(size // 2 + 1))
    yield list(torch.randperm(size, generator=draw).split(3))


def _padded(tensor: Tensor) -> Tensor:
    """Return `[B, T]` with further columns of zeros, which are outside the mask."""
    return torch.nn.functional.pad(tensor, (0, PADDING))


def _name(function: object) -> str:
    return getattr(function, "__name__", repr(function))


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"
