"""A foreign package of the name `models` is named, with its place, before it is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

import paxkv
from paxkv.errors import ConfigError
from paxkv.package_origin import check_package_origin

ROOT = Path(paxkv.__file__).parents[1]


def test_packages_that_lie_side_by_side_pass() -> None:
    check_package_origin()


@pytest.mark.parametrize("is_package", [True, False])
def test_foreign_models_is_named_with_both_places(tmp_path: Path, is_package: bool) -> None:
    foreign = tmp_path / ("models" if is_package else "models.py")
    if is_package:
        foreign.mkdir()
        (foreign / "__init__.py").write_text("")
    else:
        foreign.write_text("")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import paxkv.llm"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode != 0
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith(f"{ConfigError.__module__}.{ConfigError.__name__}")
    assert str(foreign) in last_line and str(ROOT) in last_line


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'models'.*nowhere"):
        check_package_origin()
