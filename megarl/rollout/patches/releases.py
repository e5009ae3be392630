"""Declare replacements that vLLM makes necessary."""

from functools import partial

from megarl.platform.patching import declare

VERSIONS = ">=0.26,<0.34"
"""The releases of vLLM that megarl was tried with."""
declare_vllm = partial(declare, library="vllm", versions=VERSIONS)
