"""Copies a remote checkpoint into the run's directory: completely or not at all, by all ranks together."""

import shutil
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint.contents import find_damage
from megarl.checkpoint.directory import MANIFEST_FILE, STEP_PREFIX, make_empty, step_of_name
from megarl.checkpoint.manifest import parse_manifest
from megarl.checkpoint.remote import Remote, share_of
from megarl.distributed import watchdog
from megarl.distributed.exchange import on_first_rank, together
from megarl.platform.errors import UserError
from megarl.platform.files import publish
from megarl.platform.small_files import read_bytes


def fetch(remote: Remote, directory: Path) -> Path:
    """Copy the checkpoint at `remote`, whose name is global_step_N, into `directory`; return the copy. Collective.

    A copy that `directory` already has is used as it is.

    Raises:
        UserError: there is no checkpoint, the copy does not match its manifest, or `directory` has another intact
            checkpoint of the same name.
        Exception: the error of the file system.
    """
    manifest = on_first_rank(lambda: remote.read(MANIFEST_FILE))
    name = str(remote).rpartition("/")[2]
    if manifest is None or step_of_name(name) is None:
        raise UserError(
            f"{remote} is not a complete checkpoint: it has no {MANIFEST_FILE}, or is not named {STEP_PREFIX}N"
        )
    final = directory / name
    part = directory / f".{name}.part"
    if not find_damage(final):
        if on_first_rank(lambda: read_bytes(final / MANIFEST_FILE)) == manifest:
            return final
        raise UserError(f"{final} is intact, but differs from {remote}: move it away")
    try:
        _copy(remote, part, manifest)
    except Exception:
        if dist.get_rank() == 0:  # the run's own checkpoints need the space
            shutil.rmtree(part, ignore_errors=True)
        raise
    on_first_rank(lambda: publish(part, final))
    return final


def _copy(remote: Remote, part: Path, manifest: bytes) -> None:
    """Copy the files that a manifest lists, and the manifest, and check them. Collective. Raises as `fetch`."""
    files = parse_manifest(manifest, remote)
    on_first_rank(lambda: make_empty(part, {str(Path(file).parent) for file in files}))
    size = dist.get_world_size()
    shares = [share_of(files, rank, size) for rank in range(size)]
    for turn in zip_longest(*shares):  # all ranks take the same turns, so that the watchdog sees progress on all
        watchdog.note(phase="fetch")
        mine = turn[dist.get_rank()]
        together(partial(remote.get, mine[0], part / mine[0]) if mine else lambda: None)
    on_first_rank(lambda: (part / MANIFEST_FILE).write_bytes(manifest))
    damage = find_damage(part)
    if damage:
        raise UserError(f"{remote} arrived damaged: {damage}")
