"""The rules of a run, and the limits of their processes, as configured."""

from dataclasses import asdict

from megarl.platform.slow_loads import reported
from megarl.rewards.config import CustomRewardSection, RulesSection, isolation_of
from megarl.rewards.rules import Rules
from megarl.sandbox.limits import WorkerLimits
from megarl.sandbox.pool import Pool


def make_rules(section: RulesSection, custom: CustomRewardSection) -> Rules:
    """Return the configured rules; nothing is loaded."""
    return Rules(
        path=custom.path,
        name=custom.name,
        kwargs=custom.reward_kwargs,
        judge=asdict(section.judge) if section.judge.url else None,
        weights=section.weights,
    )


def make_pool(section: RulesSection, custom: CustomRewardSection, *, held_s: float = 0.0) -> Pool:
    """Return processes for the rules; `Pool` explains `held_s`.

    Raises UserError if the custom file does not define its function.
    """
    rules = make_rules(section, custom)
    with reported("custom_reward_function.path", custom.path):
        form = rules.check()
    isolation = isolation_of(section, custom)
    limits = WorkerLimits(
        num_workers=section.num_workers,
        timeout_s=section.timeout_s,
        max_memory=int(section.max_memory_gb * 1e9),
        num_together=section.concurrency if form.takes_several else 1,
        isolation=isolation,
        canary_every=section.canary_every if isolation == "process" else 0,
    )
    return Pool(rules, limits, takes_ids=form.takes_ids, held_s=held_s)
