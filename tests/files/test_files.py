"""Files that are replaced as a whole: `files.replacing`, and the commands that use it."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpt2block.files.writing import replacing
from tests.command_line import python


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, content: bytes = b"new") -> None:
    with replacing(path) as file:
        file.write(content)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


def test_a_new_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "file")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert names(tmp_path) == ["file"]


def test_a_replaced_file_keeps_its_permissions(old: Path) -> None:
    old.chmod(0o604)
    write(old)
    assert (old.read_bytes(), stat.S_IMODE(old.stat().st_mode)) == (b"new", 0o604)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any file")
def test_a_read_only_file_stays(old: Path) -> None:
    old.chmod(0o444)
    with pytest.raises(PermissionError):
        write(old)
    assert old.read_bytes() == b"old"


@pytest.mark.parametrize("exists", [True, False])
def test_the_target_of_a_link_is_replaced(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to("folder/target")
    if exists:
        target.write_bytes(b"old")
    write(link)
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert names(tmp_path / "folder") == ["target"]


def test_a_name_of_the_greatest_length(tmp_path: Path) -> None:
    write(tmp_path / ("ü" * 127))
    assert names(tmp_path) == ["ü" * 127]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError()]
)
@pytest.mark.parametrize("late", [False, True])
def test_an_error_changes_nothing(
    old: Path, error: BaseException, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised while the file is written, or late, when it is complete."""

    def fail() -> None:
        with replacing(old) as file:
            file.write(b"half")
            if not late:
                raise error

    if late:
        monkeypatch.setattr("os.fsync", Mock(side_effect=error))
    with pytest.raises(type(error)):
        fail()
    assert names(old.parent) == ["file"]
    assert old.read_bytes() == b"old"


def test_a_link_to_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError):  # noqa: PT011  (ELOOP)
        write(tmp_path / "loop")
    assert names(tmp_path) == ["loop"]


def test_a_named_pipe_is_written_directly(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    write(pipe)
    reader.join()
    assert found == [b"new"]
    assert names(tmp_path) == ["pipe"]


def test_standard_output_is_written_directly() -> None:
    """Standard output is a pipe, for which /dev/stdout links to a name that is not a path."""
    code = (
        "from pathlib import Path; from gpt2block.files.writing import replacing\n"
        "with replacing(Path('/dev/stdout')) as file: file.write(b'new')"
    )
    assert python(code, check=True).stdout == "new"
