"""Prepare the process that ranks on the CPU are forked from: import what they need, do once what engines repeat.

Without a decision for the CPU, the first question for the device would ask CUDA, which does not survive the fork.
"""

import gc

gc.disable()  # until all is imported: nothing of it becomes garbage

from contextlib import suppress  # noqa: E402
from functools import cache  # noqa: E402
from importlib import import_module  # noqa: E402

import torch  # noqa: E402

from megarl.platform.device import decide_device  # noqa: E402

torch.set_num_threads(1)  # a thread would not survive the fork
decide_device("cpu")

from sentencepiece import SentencePieceNormalizer  # noqa: E402
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # noqa: E402

import megarl.learner.imported  # noqa: E402
import megarl.report.page  # noqa: E402
import megarl.rollout.imported  # noqa: E402
from megarl.config.root import Config  # noqa: E402
from megarl.data.charsmap import table_normalizer  # noqa: E402
from megarl.platform.small_files import adapter  # noqa: E402

USED = (  # by a job of a few steps; each would be imported in every rank
    "alembic.command",
    "megarl.assembly.run",
    "megarl.tracking.mlflow",
    "megarl.tracking.mlflow_store",
    "megarl.commands.train",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "pyarrow.pandas_compat",
    "sqlalchemy.dialects.sqlite",
    "torch.profiler._cupti_monitor",
    "transformers",
)
for name in USED:
    with suppress(ModuleNotFoundError):  # torch 2.11 has no monitor
        import_module(name)

adapter(Config)
rules = SentencePieceNormalizer(rule_name="nmt_nfkc").serialized_model_proto()  # those of most models of the tests
table_normalizer(ModelProto.FromString(rules).normalizer_spec.precompiled_charsmap)
megarl.report.page.library()
current_platform = import_module("vllm.platforms").current_platform
if current_platform.is_cpu() and (register := current_platform.register_triton_kernel_overrides):  # None in 0.26
    # Each engine registers the same kernels, and searches all modules for them.
    current_platform.register_triton_kernel_overrides = cache(register)
    current_platform.register_triton_kernel_overrides()
gc.enable()
gc.freeze()  # a rank that collects garbage need not look at what is never garbage
