"""Imports of large libraries: silent, and without a search for garbage."""

import gc
import logging
import os
import warnings
from collections.abc import Sequence
from importlib import import_module
from traceback import extract_tb

from megarl.platform.errors import UserError

IMPORTING = "starting: import of torch, Megatron-Core and vLLM"
"""The record of a start that imports these libraries, which takes seconds."""


def silence_imports() -> None:
    """Silence Megatron and vLLM, which list at import what they lack. `megarl doctor` reports that instead."""
    warnings.filterwarnings("ignore", module=r"(megatron|vllm|torch)\b")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def import_modules(names: Sequence[str]) -> None:
    """Import modules, and exempt everything that this process has by now from all searches for garbage.

    Libraries consist of a million objects that live as long as the process. The searches among them would take a
    third of the time of the imports, and would make each process that is forked later copy them.

    Raises:
        UserError: a module cannot be imported, for example because two packages do not fit together.
    """
    gc.disable()  # D438
    try:
        for name in names:
            import_module(name)
    except Exception as error:  # a package may raise anything
        raise import_error(name, error) from error
    finally:
        gc.enable()
        gc.freeze()


def import_error(name: str, error: BaseException) -> UserError:
    """Return the error for people of an import of `name` that raised `error`: its first cause, and the remedy."""
    cause = error
    while cause.__cause__:
        cause = cause.__cause__
    frames = extract_tb(cause.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return UserError(
        f"{name} cannot be imported: {type(cause).__name__}: {cause}{place}; `megarl doctor` examines the installed "
        "packages"
    )
