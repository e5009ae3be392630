"""The configuration of environments."""

from dataclasses import field
from typing import Any, Literal

from megarl.mark import ENGINE, REWARD, Change, Effect, key
from megarl.section import Bound, Count, CountFromZero, Length, Score, Seconds, section


@section(REWARD)
class EnvironmentSection:
    """`environment.*`: the environment that responses are turns of, instead of a reward of single responses."""

    name: str | None = None
    """A built-in environment (openenv, python, reasoning_gym), or the class in `path`."""
    path: str | None = None
    """Python file that defines the class; null = a built-in environment."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class."""
    run_code: bool = key(False, Change(Effect.NONE, "whether programs of the policy may run"))
    """Allow name=python to run the policy's programs."""
    max_turns: Count = 8
    """Most turns of the policy in an episode."""
    max_observation_length: Length = 512
    """Most tokens of an observation; a longer one fails."""
    overlap: CountFromZero = key(1, ENGINE)
    """Windows of 16 engine steps before the engine waits for the answer to a turn."""
    num_workers: Count = key(4, Change(Effect.NONE, "how many episodes are played at once"))
    """Processes on each rank for environments."""
    timeout_s: Seconds = 10.0
    """Seconds that an environment may take for a turn."""
    max_memory_gb: Bound = 8.0
    """Memory of a process of environments, in 10^9 bytes."""
    on_failure: Literal["mask", "score", "stop"] = "mask"
    """A failed episode is ignored (mask), ends with default_score (score), or stops the run (stop)."""
    default_score: Score = 0.0
    """Reward of a turn that reaches data.max_response_length, and of a failed turn."""
