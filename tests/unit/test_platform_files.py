from pathlib import Path

import pytest

from megarl.platform.files import check_writable, explained, inside, publish, similar
from tests.support.disks import small_disk


@pytest.mark.parametrize("name", ["a", "a/b.c", "..a/b..", "a/./b", ".metadata", "a b"])
def test_names_below_a_directory_are_taken(name: str) -> None:
    assert inside(Path("/run"), name) == Path("/run") / name


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/../b", "a/..", "/etc/passwd", "//a", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no file below /run"):
        inside(Path("/run"), name)


def test_unwritable_directory_is_named_with_remedy(tmp_path: Path) -> None:
    check_writable(tmp_path, "trainer.default_local_dir")
    check_writable(tmp_path / "made" / "later", "trainer.default_local_dir")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"trainer.x=.*/file/run cannot be written: .*a file is in the place of the directory"
    ):
        check_writable(tmp_path / "file" / "run", "trainer.x")
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        with disk.read_only(), pytest.raises(ValueError, match=r"Read-only file system; have it mounted for writing"):
            check_writable(disk.path / "run", "trainer.x")
        disk.fill()
        with pytest.raises(ValueError, match=r"No space left on device; free space there"):
            check_writable(disk.path, "trainer.x")
        assert [path.name for path in disk.path.iterdir()] == ["ballast"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc")
def test_file_system_without_file_creation_is_named() -> None:
    with pytest.raises(ValueError, match=r"trainer.x=/proc/run cannot be written: "):
        check_writable(Path("/proc/run"), "trainer.x")


def test_what_cannot_be_replaced_stays(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "none", tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_the_most_similar_path_is_meant(tmp_path: Path) -> None:
    (tmp_path / "runs" / "tutorial").mkdir(parents=True)
    (tmp_path / "runs" / "tutorial" / "grpo.yaml").touch()
    meant = f": did you mean {tmp_path}/runs/tutorial/grpo.yaml?"
    assert similar(tmp_path / "runs" / "tutorial" / "gpro.yaml") == meant
    assert similar(tmp_path / "runs" / "tutoriol" / "grpo.yaml") == meant
    for nowhere in ("runs/tutoriol/other.yaml", "runs/tutorial/grpo.yaml/below", "zzz", "runs"):
        assert similar(tmp_path / nowhere) == ""


def test_errors_of_libraries_are_recognised() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    full = "the tokenizer cannot be written: No space left on device; free"
    with pytest.raises(ValueError, match=full), explained("the tokenizer"):
        Tokenizer(WordLevel({"a": 0}, unk_token="a")).save("/dev/full")
    with pytest.raises(ZeroDivisionError), explained("nothing"):
        raise ZeroDivisionError
