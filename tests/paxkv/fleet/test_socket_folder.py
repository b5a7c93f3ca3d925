"""Folders of socket files are removed by their process, or after it was killed."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paxkv.fleet.socket_folder import SocketFolder, remove_stale_folders
from tests.killed_after import killed_after

_OWNER = """
import sys
from paxkv.fleet.socket_folder import SocketFolder
folder = SocketFolder()
print(folder.path, flush=True)
if sys.argv[1] == "wait":
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folders_here(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def start_owner(what: str) -> tuple[subprocess.Popen, Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with killed_after(60, process):
        return process, Path(process.stdout.readline().strip())


def make_old(path: Path) -> None:
    (path / "outputs").touch()
    os.utime(path, (1, 1))


def test_folder_is_removed_at_exit_of_its_process():
    process, path = start_owner("exit")
    with process:
        assert process.wait(60) == 0
    assert path.name.startswith("paxkv-engine-") and not path.exists()
    folder = SocketFolder()
    assert folder.path.is_dir()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()
    folder = SocketFolder()
    shutil.rmtree(folder.path)  # by a program that tidies up temporary files
    folder.remove()


def test_only_the_folder_of_a_killed_process_is_stale():
    process, path = start_owner("wait")
    with process:
        make_old(path)
        remove_stale_folders()
        assert (path / "outputs").exists()
        process.kill()
        process.wait(60)
    # A new folder may not be locked yet.
    new = Path(tempfile.mkdtemp(prefix="paxkv-engine-"))
    remove_stale_folders()
    assert not path.exists() and new.exists()


def test_folders_of_other_origin_are_not_removed(tmp_path):
    shared = tmp_path / "paxkv-engine-shared"
    shared.mkdir()
    shared.chmod(0o755)
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    link = tmp_path / "paxkv-engine-link"
    link.symlink_to(target)
    file = tmp_path / "paxkv-engine-file"
    file.touch()
    for path in (shared, target):
        make_old(path)
    remove_stale_folders()
    assert shared.exists() and link.is_symlink() and file.exists()
    assert (target / "outputs").exists()
