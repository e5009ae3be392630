"""Writing a sharded checkpoint: one file for each rank, written in the calling thread, with errors on all ranks."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from megarl.distributed.exchange import together
from megarl.learner.patches.megatron import declare_megatron
from megarl.platform.patching import replace, replaced

WRITER_CLASS = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"
WRITER = declare_megatron(
    WRITER_CLASS,
    "prepare_write_data",
    "get_save_function_and_args",
    "retrieve_write_results",
    reason=(
        "every view is copied before anything is written; 0.16.1 also writes in forked processes, which is unsafe with "
        "the threads of gloo and vLLM"
    ),
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/3424",
    until="Megatron-Core writes in the calling thread, from the tensors it is given",
)
INDEX = declare_megatron(
    WRITER_CLASS,
    "finish",
    reason="rank 0 alone writes the index, and the other ranks wait in a collective if it fails",
    upstream="megatron/core/dist_checkpointing/strategies/filesystem_async.py: FileSystemWriterAsync.finish",
    until="an error of rank 0 is raised on all ranks",
)
CONFIG = declare_megatron(
    "megatron.core.dist_checkpointing.serialization",
    "save_config",
    reason="rank 0 alone writes the description of the format, and the other ranks wait in a collective if it fails",
    upstream="megatron/core/dist_checkpointing/serialization.py: save",
    until="an error of rank 0 is raised on all ranks",
)
COMMON = declare_megatron(
    "megatron.core.dist_checkpointing.strategies.common:TorchCommonSaveStrategy",
    "save_common",
    reason="in 0.16.1 rank 0 alone writes the objects that all ranks share, and torch hides the cause of a failure",
    upstream="megatron/core/dist_checkpointing/strategies/common.py: TorchCommonSaveStrategy; removed by 0.19.2",
    until="0.16.1 is no longer supported",
)


def write_in_this_process() -> None:
    """Let Megatron's writer work in the calling thread."""
    replace(
        WRITER,
        prepare_write_data=_prepare,
        get_save_function_and_args=lambda self: (MethodType(_write, self), None, ()),
        retrieve_write_results=lambda self: self.rank_results,
    )


def _prepare(self: Any, plan: Any, planner: Any) -> None:
    self.rank_file = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
    self.rank_items = [(item.index, planner.resolve_data(item)) for item in plan.items]
    self.rank_results = []


def _write(self: Any) -> None:
    if not self.rank_items:
        return
    with (Path(self.checkpoint_dir) / self.rank_file).open("wb") as stream:
        for index, data in self.rank_items:
            start = stream.tell()
            if isinstance(data, io.BytesIO):
                stream.write(data.getbuffer())
            else:
                torch.save(_alone(data.detach().cpu()), stream)
            length = stream.tell() - start
            place = _StorageInfo(self.rank_file, start, length)
            self.rank_results.append(WriteResult(index=index, size_in_bytes=length, storage_data=place))
        stream.flush()
        os.fsync(stream.fileno())
    self.rank_items = []


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage holds nothing else: torch saves the complete storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def first_rank_failing_with_all() -> Iterator[None]:
    """Raise on all ranks, at the end of the block, what rank 0 could not write to the disk."""
    from megatron.core.dist_checkpointing.strategies import common

    errors: list[OSError] = []

    def attempt(write: Callable[..., object], *args: object) -> None:
        try:
            write(*args)
        except OSError as error:
            errors.append(error)

    def finish(self: object, *args: object) -> None:
        attempt(partial(write_index, self), *args)

    def save_common(self: object, state: object, directory: str | Path) -> None:
        if dist.get_rank() == 0:
            data = io.BytesIO()
            torch.save(state, data)
            attempt((Path(directory) / common.COMMON_STATE_FNAME).write_bytes, data.getbuffer())

    write_index = INDEX.original("finish")
    with ExitStack() as patched:
        if COMMON.is_present:
            patched.enter_context(replaced(COMMON, save_common=save_common))
        patched.enter_context(replaced(INDEX, finish=finish))
        patched.enter_context(replaced(CONFIG, save_config=partial(attempt, CONFIG.original("save_config"))))
        yield
    together(lambda: _raise_first(errors))


def _raise_first(errors: list[OSError]) -> None:
    for error in errors:
        raise error
