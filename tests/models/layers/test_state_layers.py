"""Layers with states."""

import re
from pathlib import Path

import models


def test_layers_read_and_write_states_on_each_device() -> None:
    """Outside of `by_device`, a format would see the pages of all devices as one page."""
    paths = [*Path(models.__file__).parent.rglob("*.py")]
    found = {path.name for path in paths if re.search(r"format\.(read|write)\b", path.read_text())}
    assert found == {"layer_context.py"}
