"""The command says what is wrong with the folder that it is given."""

import pytest

from models.demo import evaluate


@pytest.mark.parametrize("config", [None, "{", "{}"])
def test_folder_that_is_no_checkpoint_ends_with_the_usage(tmp_path, capsys, config) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(SystemExit, match="2"):
        evaluate.main([str(tmp_path)])
    assert f"{tmp_path} is no checkpoint" in capsys.readouterr().err
