"""Megatron's shards as files: one for each rank, written in the thread that asks for it, from whatever memory.

It stands in Megatron's writer (megatron-core 0.16.1, 0.19.2), which copies every view before it writes anything. 0.16.1
also writes in processes forked beside the threads of gloo and vLLM, and hears of them through a manager process.
"""

import io
import os
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult


def write_in_this_process() -> None:
    """Have Megatron's writer do its work here; calling it again changes nothing."""
    FileSystemWriterAsync.prepare_write_data = _prepare
    FileSystemWriterAsync.get_save_function_and_args = lambda self: (self.write_rank, None, ())
    FileSystemWriterAsync.retrieve_write_results = lambda self: self.rank_results
    FileSystemWriterAsync.write_rank = _write


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
    """A tensor whose storage holds nothing else: torch saves the whole of it."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
