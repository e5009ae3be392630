"""The arguments that `engine_kwargs` may contain, from vLLM's own class of arguments."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megarl.rollout.meanings import is_neutral, reason_against
from megarl.rollout.types import allows_false, mismatch

OURS = frozenset(
    {
        "model",
        "trust_remote_code",
        "skip_tokenizer_init",
        "generation_config",
        "load_format",
        "dtype",
        "seed",
        "distributed_executor_backend",
        "tensor_parallel_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "enforce_eager",
        "enable_prefix_caching",
        "enable_sleep_mode",
        "logprobs_mode",
        "hf_overrides",
    }
)
"""Arguments that follow from other keys of the configuration."""


def engine_faults(arguments: Mapping[str, object]) -> Iterator[str]:
    """Yield a message for each argument that vLLM does not have or that the user must not set, or set to that value."""
    known = engine_arguments()
    types = _declared()
    for name, value in arguments.items():
        if name in ("vllm", "sglang", "trtllm"):
            yield f"{name}: the engine is vLLM, write its arguments without that name"
        elif name in OURS:
            yield f"{name} follows from other keys of the configuration: remove it"
        elif name not in known:
            meant = get_close_matches(name, known, n=1)
            yield f"vLLM has no argument {name}: " + (f"did you mean {meant[0]}?" if meant else "see vllm.EngineArgs")
        elif value is not None:  # else it is as without the argument
            yield from _value_faults(name, value, types.get(name))


def _value_faults(name: str, value: object, declared: ast.expr | None) -> Iterator[str]:
    """Yield why an argument, of the `declared` type if that is known, must not have a value."""
    reason = reason_against(name)
    if reason:
        if not is_neutral(name, value, is_switch=declared is not None and allows_false(declared)):
            yield f"{name} {reason}: remove it"
    elif declared is not None:
        yield from mismatch(name, value, declared)


@cache
def engine_arguments() -> frozenset[str]:
    """Return the names of vLLM's arguments, from its source if possible: importing vLLM takes ten seconds."""
    declared = _declared()
    if declared:
        return frozenset(declared)
    from megarl.rollout.patches import prepare_environment

    prepare_environment()  # vLLM reads it when it is imported
    from vllm import EngineArgs

    return frozenset(field.name for field in fields(EngineArgs))


@cache
def _declared() -> Mapping[str, ast.expr]:
    """Return the annotation of each argument in vLLM's source; nothing if there is no such class."""
    package = find_spec("vllm")
    if package and package.origin:
        source = Path(package.origin).with_name("engine") / "arg_utils.py"
        for node in ast.parse(source.read_text(encoding="utf-8")).body if source.is_file() else []:
            if isinstance(node, ast.ClassDef) and node.name == "EngineArgs" and not node.bases:
                annotated = (line for line in node.body if isinstance(line, ast.AnnAssign))
                return {line.target.id: line.annotation for line in annotated if isinstance(line.target, ast.Name)}
    return {}
