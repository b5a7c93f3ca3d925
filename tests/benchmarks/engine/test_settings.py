"""Settings by name are checked before an engine is started."""

import pytest

from benchmarks.engine.settings import engine_config, settings_by_part
from paxkv.errors import ConfigError


def test_settings_go_where_their_fields_are() -> None:
    parts = settings_by_part({"block_size": 32, "max_num_seqs": 2, "kernels": "xla"})
    assert parts["cache"] == {"block_size": 32}
    assert parts["scheduler"] == {"max_num_seqs": 2}
    assert parts["runner"] == {"kernels": "xla"}
    assert engine_config(parts).cache.block_size == 32
    with pytest.raises(ConfigError, match="paxkv has no setting blocksize"):
        settings_by_part({"blocksize": 32})
