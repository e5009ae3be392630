"""Commands of setuptools that record the commit of the checkout in built packages, for `megarl --version`."""

import subprocess
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parents[1]
COMMIT_FILE = Path("megarl", "commit.txt")


def write_commit(directory: str) -> None:
    """Write the commit of this checkout into a package under `directory`; nothing if this is no checkout."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
        Path(directory, COMMIT_FILE).write_text(commit, encoding="utf-8")


class BuildWithCommit(build_py):
    """Builds the package, with its commit."""

    def run(self) -> None:
        """Build, then write the commit; an editable installation asks git each time."""
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class SourceWithCommit(sdist):
    """Builds the source distribution, with its commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files, then write the commit."""
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)
