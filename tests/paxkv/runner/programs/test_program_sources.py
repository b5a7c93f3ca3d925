"""The digest of sources changes with what decides a step's result, and with nothing else."""

import functools
import os
import shutil
import sys
import types
from pathlib import Path

import pytest

import paxkv
from paxkv.runner.programs import program_sources
from paxkv.runner.programs.program_sources import program_source_files, source_digest

ROOT = Path(paxkv.__file__).resolve().parents[1]


@pytest.fixture
def copied_root(tmp_path, monkeypatch) -> Path:
    """A copy of our packages' source files, which `source_digest` reads in place of ours."""
    for package in ("models", "pallas_kernels", "paxkv"):
        for path in (ROOT / package).rglob("*.py"):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            make_older(copy)
    monkeypatch.setattr(program_sources, "_ROOT", tmp_path)
    return tmp_path


def make_older(path: Path) -> None:
    """As if the file had been written before this process started."""
    os.utime(path, (1_000_000_000, 1_000_000_000))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    make_older(path)


def fresh_digest() -> str:
    return source_digest.__wrapped__()


def test_an_edited_docstring_changes_the_digest_where_the_file_matters(copied_root):
    for file, changes in (
        ("pallas_kernels/paged_attention/mosaic_gpu_decode_kernel.py", True),
        ("paxkv/config/sampling_params.py", True),
        ("paxkv/server/routes/chat.py", False),
        ("paxkv/llm.py", False),
    ):
        before = fresh_digest()
        assert fresh_digest() == before
        edit(copied_root / file, '"""', '"""Edited. ')
        assert (fresh_digest() != before) == changes, file


def test_a_new_file_and_a_renamed_one_change_the_digest(copied_root):
    before = fresh_digest()
    added = copied_root / "models" / "added.py"
    added.write_text("")
    make_older(added)
    with_file = fresh_digest()
    added.rename(added.with_name("renamed.py"))
    assert len({before, with_file, fresh_digest()}) == 3


@pytest.mark.parametrize("is_folder", [True, False])
def test_the_source_of_a_family_from_another_package_counts(tmp_path, monkeypatch, is_folder):
    file = tmp_path / ("other/model.py" if is_folder else "other.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text('"""A family."""')
    make_older(file)
    module = types.ModuleType("other")
    if is_folder:
        module.__path__ = [str(tmp_path / "other")]
    else:
        module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "other", module)
    digest_of = functools.partial(source_digest.__wrapped__, frozenset({"models", "other"}))
    before = digest_of()
    assert before == digest_of() != source_digest.__wrapped__(frozenset({"models"}))
    edit(file, '"""', '"""Edited. ')
    assert digest_of() != before


@pytest.mark.parametrize(
    ("edited", "counts"),
    [("other.py", True), ("near.py", True), ("far/part.py", True), ("beside.py", False)],
)
def test_what_a_single_file_imports_from_its_folder_counts(tmp_path, monkeypatch, edited, counts):
    (tmp_path / "far").mkdir()
    texts = {
        "other.py": '"""A family."""\nimport jax\nfrom near import f\n',
        "near.py": '"""Imported."""\nimport far.part\n',
        "far/__init__.py": '"""A package."""\n',
        "far/part.py": '"""Imported by what is imported."""\nimport other\n',
        "beside.py": '"""Imported by none."""\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        make_older(tmp_path / name)
    module = types.ModuleType("other")
    module.__file__ = str(tmp_path / "other.py")
    monkeypatch.setitem(sys.modules, "other", module)
    digest_of = functools.partial(source_digest.__wrapped__, frozenset({"other"}))
    before = digest_of()
    edit(tmp_path / edited, '"""', '"""Edited. ')
    assert (digest_of() != before) == counts
    # Installed packages beside it are not read.
    monkeypatch.setattr(program_sources.sysconfig, "get_path", lambda name: str(tmp_path))
    assert digest_of() == digest_of() != before


def test_a_package_without_source_files_has_a_digest_of_its_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "other", types.ModuleType("other"))
    digests = {source_digest.__wrapped__(frozenset({"other"})) for _ in range(2)}
    assert len(digests) == 2


def test_a_file_written_while_the_process_runs_makes_a_digest_of_its_own(copied_root):
    (copied_root / "models" / "decoders" / "decoder.py").write_text("x = 2\n")
    assert fresh_digest() != fresh_digest()


def test_the_files_belong_to_the_device_half():
    names = {path.relative_to(ROOT).as_posix() for path in program_source_files()}
    assert {
        "models/decoders/decoder.py",
        "pallas_kernels/paged_attention/xla.py",
        "paxkv/runner/programs/step.py",
        "paxkv/runner/programs/invariant_step.py",
        "paxkv/runner/model_runner.py",
        "paxkv/runner/__init__.py",
        "paxkv/contracts/kv_cache_spec.py",
        "paxkv/__init__.py",
    } <= names
    host = (
        "paxkv/server/",
        "paxkv/client/",
        "paxkv/scheduler/",
        "paxkv/kv_cache/",
        "paxkv/engine/",
    )
    assert [name for name in sorted(names) if name.startswith(host)] == []
