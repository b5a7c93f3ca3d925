"""A profile is recorded into a folder, one at a time."""

import jax.numpy as jnp
import pytest

from paxkv.errors import PaxkvError
from paxkv.runner.profiler import Profiler


def test_profile_is_written_to_the_folder_and_a_second_start_is_refused(tmp_path):
    profiler = Profiler()
    assert not profiler.stop()
    assert profiler.start(str(tmp_path / "profiles"))
    assert not profiler.start(str(tmp_path / "others"))
    with pytest.raises(PaxkvError, match="cannot record a profile"):
        Profiler().start(str(tmp_path / "others"))
    jnp.arange(3).sum().block_until_ready()
    assert profiler.stop()
    assert not profiler.stop()
    assert list((tmp_path / "profiles").rglob("*.xplane.pb"))
    assert not (tmp_path / "others").exists()
