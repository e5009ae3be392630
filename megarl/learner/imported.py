"""Imports of all that a learner needs, also of what Megatron-Core imports only when it reads or writes a checkpoint.

For the process that ranks are forked from, which imports once what each of them would import again.
"""

import megatron.core.dist_checkpointing.strategies.filesystem_async
import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401

import megarl.learner.checkpoint
import megarl.learner.factory
import megarl.learner.rotary  # noqa: F401
