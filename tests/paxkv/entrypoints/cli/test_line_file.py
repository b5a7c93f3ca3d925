"""An output file contains only whole lines, also if writing is interrupted."""

import os

import pytest

from paxkv.entrypoints.cli.line_file import LineFile


def test_old_contents_are_kept_until_the_file_is_cleared(tmp_path):
    path = tmp_path / "out"
    path.write_text("old lines\n" * 9)
    with LineFile(str(path)) as file:
        assert path.read_text().startswith("old")
        file.clear()
        file.write_line(b"a")
        assert path.read_bytes() == b"a\n"
        file.write_line(b"b" * 100_000)
    assert path.read_bytes() == b"a\n" + b"b" * 100_000 + b"\n"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_incomplete_line_is_removed(tmp_path, monkeypatch, error):
    path = tmp_path / "out"
    write = os.write
    answers = iter([3, error])

    def write_a_part(fd, data):
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return write(fd, data[:answer])

    with LineFile(str(path)) as file:
        file.write_line(b"whole")
        monkeypatch.setattr(os, "write", write_a_part)
        with pytest.raises(type(error)):
            file.write_line(b"another")
    assert path.read_bytes() == b"whole\n"


def test_line_written_in_several_parts_is_complete(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:2]))
    with LineFile(str(tmp_path / "out")) as file:
        file.write_line(b"abcdef")
    assert (tmp_path / "out").read_bytes() == b"abcdef\n"


def test_stdout_and_devices_are_never_truncated(capfd):
    with LineFile("-") as file:
        file.clear()
        file.write_line(b"to stdout")
    assert capfd.readouterr().out == "to stdout\n"
    with LineFile("/dev/null") as file:
        file.clear()
        file.write_line(b"nowhere")
    with pytest.raises(OSError), LineFile("/dev/full") as file:
        file.write_line(b"a")
