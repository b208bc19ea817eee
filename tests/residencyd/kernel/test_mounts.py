import os
from pathlib import Path

import pytest
from sojourn.residencyd.kernel.errors import ParseFailed, ProcessGone
from sojourn.residencyd.kernel.mounts import parse_mountinfo, read_mounts


def test_types_by_device(captures: Path) -> None:
    types = read_mounts(4711, proc=captures / "proc")
    assert types[0xFE, 0] == "ext4"
    assert types[0, 0x1B] == "tmpfs"


def test_optional_fields_and_blanks_in_names() -> None:
    line = b"36 35 98:0 /m\\0401 /mnt\\0402 rw,noatime master:1 shared:2 - fuse.x /dev/root rw,errors=continue\n"
    assert parse_mountinfo(line) == {(98, 0): "fuse.x"}


@pytest.mark.parametrize("line", [b"36 35\n", b"36 35 98:0 / / rw\n", b"36 35 98 / / rw - ext4 x rw\n"])
def test_a_malformed_line_is_refused(line: bytes) -> None:
    with pytest.raises(ParseFailed):
        parse_mountinfo(line)


def test_own_mounts() -> None:
    root = Path("/").stat().st_dev
    assert (os.major(root), os.minor(root)) in read_mounts()


def test_a_process_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProcessGone):
        read_mounts(1, proc=tmp_path)
