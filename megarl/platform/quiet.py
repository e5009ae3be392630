"""The silence of libraries while they are imported."""

import logging
import os
import warnings


def silence_imports() -> None:
    """Silence Megatron and vLLM, which list at import what they lack. `megarl.doctor` reports that instead."""
    warnings.filterwarnings("ignore", module=r"(megatron|vllm|torch)\b")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
