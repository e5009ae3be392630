"""Declare replacements that Megatron-Core makes necessary."""

from functools import partial

from megarl.platform.patching import declare

VERSIONS = ">=0.16.1,<=0.19.2"
"""The releases of Megatron-Core that megarl's tests run with: the oldest and the newest."""
declare_megatron = partial(declare, library="megatron-core", versions=VERSIONS)
