"""Settings by name are checked before an engine is started."""

import argparse

import pytest

from benchmarks.engine.settings import checked_settings, engine_config, settings_by_part
from paxkv.errors import ConfigError


def test_settings_go_where_their_fields_are() -> None:
    parts = settings_by_part({"block_size": 32, "max_num_seqs": 2, "kernels": "xla"})
    assert parts["cache"] == {"block_size": 32}
    assert parts["scheduler"] == {"max_num_seqs": 2}
    assert parts["runner"] == {"kernels": "xla"}
    assert engine_config(parts).cache.block_size == 32
    with pytest.raises(ConfigError, match="paxkv has no setting blocksize"):
        settings_by_part({"blocksize": 32})


@pytest.mark.parametrize(
    ("pairs", "complaint"),
    [
        ([("nonsense", 1)], "no setting nonsense"),
        ([("block_size", 7)], "block_size must be"),
        ([("block_size", 16), ("block_size", 32)], "given twice"),
        ([("dtype", "bfloat16")], "dtype is decided by --dtype"),
    ],
)
def test_setting_that_cannot_work_ends_with_the_usage(pairs, complaint, capsys) -> None:
    parser = argparse.ArgumentParser()
    good = [("block_size", 16)]
    assert checked_settings(parser, good, decided_by={"dtype": "--dtype"}) == dict(good)
    with pytest.raises(SystemExit, match="2"):
        checked_settings(parser, pairs, decided_by={"dtype": "--dtype"})
    assert complaint in capsys.readouterr().err
