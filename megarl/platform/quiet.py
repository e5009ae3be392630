"""The silence of libraries while they are imported."""

import logging
import os
import warnings

IMPORTING = "starting: import of torch, Megatron-Core and vLLM"
"""The record of a start that imports these libraries, which takes seconds."""


def silence_imports() -> None:
    """Silence Megatron and vLLM, which list at import what they lack. `megarl doctor` reports that instead."""
    warnings.filterwarnings("ignore", module=r"(megatron|vllm|torch)\b")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
