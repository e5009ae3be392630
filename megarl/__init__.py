"""Reinforcement-learning post-training of language models: Megatron-Core learners and vLLM rollouts in one process.

Imports run one way: api > commands > assembly > training, planning > samples, weight_sync, report > checkpoint, config
> learner, rollout > models > environments > reshard, data, tracking > rewards > sandbox > algorithms, distributed >
platform > batch, section.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.api.check import check, plan, score
    from megarl.api.run import TrainingRun, load_run
    from megarl.api.train import train

__version__ = "0.1.0"
__all__ = ["TrainingRun", "check", "load_run", "plan", "score", "train"]

_NAMES = {"check": ("check", "plan", "score"), "run": ("TrainingRun", "load_run"), "train": ("train",)}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name of `megarl.api` when it is first used, so that `import megarl` stays quick."""
    if name not in _MODULES:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}")
    return getattr(import_module(f"megarl.api.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
