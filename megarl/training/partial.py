"""Partial rollouts: a step ends before its slowest responses do, and these continue under the weights of later steps.

If `stop_when` is a share, the engine draws more groups than a step learns from. The step ends at the first exchange
that finds a full batch of complete groups, and learns from the oldest of them. If `stop_when` is a number of engine
steps, the engine draws one batch of groups. The step ends at the first exchange after so many engine steps that finds a
complete group, and learns from all that are complete. The other groups keep their tokens, and each token keeps its
log-probability and the version of the weights that drew it. In the next step their tokens are given to the engine as a
part of the prompt, so that no key of older weights is read.

A step waits for every group that would otherwise become older than `max_staleness` steps. So nothing is drawn in vain,
and long responses are learnt from as often as short ones. No more than `wanted` groups outlive a step, because a share
is at least one half, so that a step can learn from all groups that it waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.batch import Group, Rollouts
from megarl.data.order import Position
from megarl.distributed.sharded import Sharded
from megarl.rollout.config import PartialSection
from megarl.rollout.session import WINDOW
from megarl.training.interfaces import Metrics, PromptSource, Sampler, Session
from megarl.training.statistics import summaries


@dataclass(frozen=True, kw_only=True)
class Partial:
    """How many groups a step draws and learns from, and how old their tokens may be."""

    wanted: int  # the most groups that a step learns from
    num_samples: int  # of a group
    section: PartialSection

    @property
    def num_drawn(self) -> int:
        """The number of groups that the engine draws at once."""
        return self.section.num_drawn(self.wanted)

    def may_end(self, *, num_complete: int, num_exchanges: int) -> bool:
        """Return whether a step may end with `num_complete` groups complete, after `num_exchanges` exchanges."""
        num_steps = self.section.num_engine_steps
        if num_steps:
            return num_complete > 0 and num_exchanges * WINDOW >= num_steps
        return num_complete >= self.wanted


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The groups of a step: those to learn from, and those that continue."""

    chosen: list[Group]
    in_flight: tuple[Group, ...]
    position: Position  # of the next step in the data
    metrics: Metrics


def draw_enough(
    partial: Partial,
    prompts: PromptSource,
    sampler: Sampler,
    in_flight: Sequence[Group],
    position: Position,
    *,
    step: int,
) -> Drawn:
    """Continue the `in_flight` groups and begin others, until the step may end."""
    groups, num_wasted = _renewed(in_flight, partial, step=step)
    recomputed = sum(sample.num_tokens for group in groups for sample in group.samples if not sample.complete)
    missing = partial.num_drawn - len(groups)
    if missing > 0:
        fresh, position = prompts.take(position, missing)
        groups += sampler.groups(fresh, step=step)
    session = sampler.open(step=step, keeps_stopped=True)
    chosen, rest = _draw(session, groups, partial, step=step)
    metrics = {
        "rollout/occupancy": session.occupancy(),
        "rollout/complete_prompts": float(len(chosen)),
        "rollout/carried_share": len(rest) / len(groups),
        "rollout/recomputed_tokens": float(recomputed),
        "rollout/wasted_tokens": float(num_wasted),
    }
    return Drawn(chosen=chosen, in_flight=tuple(rest), position=position, metrics=metrics)


def staleness(rollouts: Sharded[Rollouts], *, step: int) -> Metrics:
    """Measure the steps that finished between the weights of each response token and this step. Collective."""
    versions = rollouts.share.weight_versions
    assert versions is not None, "samples that an engine drew"
    [summary] = summaries(rollouts, step - versions)
    return {"rollout/staleness/mean": summary.mean, "rollout/staleness/max": summary.largest}


def _renewed(in_flight: Sequence[Group], partial: Partial, *, step: int) -> tuple[list[Group], int]:
    """Begin groups that are too old or of another size anew. Return all groups, and the number of tokens that are lost.

    No group becomes so in a run; a run that is resumed with other settings may have such groups.
    """
    groups = list[Group]()
    num_lost = 0
    for group in in_flight:
        is_young = step - group.started <= partial.section.max_staleness
        if is_young and len(group.samples) == partial.num_samples:
            groups.append(group)
        else:
            num_lost += group.num_tokens
            groups.append(Group.new(group.prompt, range(partial.num_samples), started=step))
    return groups, num_lost


def _draw(session: Session, groups: Sequence[Group], partial: Partial, *, step: int) -> tuple[list[Group], list[Group]]:
    """Draw until the step may end. Return the groups to learn from and the others, each in their order."""
    complete = {number: group for number, group in enumerate(groups) if group.is_complete}
    late = {number for number, group in enumerate(groups) if step - group.started >= partial.section.max_staleness}
    session.add({number: group for number, group in enumerate(groups) if number not in complete})
    num_exchanges = 0
    while session.num_open:
        is_enough = partial.may_end(num_complete=len(complete), num_exchanges=num_exchanges)
        if is_enough and late <= complete.keys():
            break
        complete |= session.advance()
        num_exchanges += 1
    everything = complete | session.stop()
    chosen = sorted(complete)[: partial.wanted]
    rest = sorted(everything.keys() - set(chosen))
    return [everything[number] for number in chosen], [everything[number] for number in rest]
