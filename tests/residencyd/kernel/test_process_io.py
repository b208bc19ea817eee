from pathlib import Path

import pytest
from sojourn.residencyd.kernel.errors import ParseFailed
from sojourn.residencyd.kernel.process_io import ProcessIo, parse_io, read_io


def test_storage_not_calls(captures: Path) -> None:
    assert read_io(4711, proc=captures / "proc") == ProcessIo(read_bytes=3473408, written_bytes=12288)


def test_own() -> None:
    assert read_io().read_bytes >= 0


@pytest.mark.parametrize("text", [b"", b"read_bytes: 1\n", b"read_bytes: x\nwrite_bytes: 1\n"])
def test_a_missing_field_is_refused(text: bytes) -> None:
    with pytest.raises(ParseFailed):
        parse_io(text)
