"""The configuration of environments."""

from dataclasses import field
from typing import Any, Literal

from megarl.mark import ENGINE, REWARD, Change, Effect, key
from megarl.section import Bound, Count, CountFromZero, Length, Score, Seconds, section


@section(REWARD)
class EnvironmentSection:
    """`environment.*`: the environment that responses are turns of, instead of a reward of single responses."""

    name: str | None = None
    """A built-in environment (openenv, python, reasoning_gym), or the class in `path`; null = every
    response is judged once."""
    path: str | None = None
    """Python file that defines the class; null = a built-in environment."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class."""
    run_code: bool = key(False, Change(Effect.NONE, "whether programs of the policy may run"))
    """Allow name=python to run the programs that the policy writes, with all rights of this run's user."""
    max_turns: Count = 8
    """Most turns of the policy in an episode."""
    max_observation_length: Length = 512
    """Most tokens of an observation; a longer one fails. data.max_response_length bounds all tokens of an episode."""
    overlap: CountFromZero = key(1, ENGINE)
    """Windows of 16 engine steps in which the engine draws other samples before it waits for the answer to a turn."""
    num_workers: Count = key(4, Change(Effect.NONE, "how many episodes are played at once"))
    """Processes on each rank that environments run in. Each episode stays in one process."""
    timeout_s: Seconds = 10.0
    """Seconds that an environment may take for one turn; after that its process is killed."""
    max_memory_gb: Bound = 8.0
    """Private memory of a process of environments, in 10^9 bytes."""
    on_failure: Literal["mask", "score", "stop"] = "mask"
    """The treatment of an episode whose environment takes too long or fails: training and metrics ignore it (mask), its
    last turn gets default_score (score), or the run stops (stop)."""
    default_score: Score = 0.0
    """Reward of a turn that reaches data.max_response_length, and of such a turn with on_failure=score."""
