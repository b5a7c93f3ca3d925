"""Every family answers as live transformers does, under every setting of `parity.SETTINGS`."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.end_to_end.parity import TABLE_HEAD, ParityEngine, make_reference, table_line
from tests.oracles.test_families import LOADED


@pytest.mark.parametrize("family", LOADED)
def test_family_answers_as_transformers_does(family: str, tmp_path: Path) -> None:
    run_seeds(family, (1,), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", LOADED)
def test_other_weights_answer_so_too_with_the_same_programs(family: str, tmp_path: Path) -> None:
    run_seeds(family, (1, 2, 3), tmp_path)


def run_seeds(family: str, seeds: tuple[int, ...], folder: Path) -> None:
    """Prints the table; asserts that all but the first seed compile nothing."""
    engine, num_programs = None, None
    print(f"\n{TABLE_HEAD}")
    for seed in seeds:
        checkpoint = folder / str(seed)
        reference = make_reference(family, checkpoint, seed)
        if engine is None:
            engine = ParityEngine(checkpoint)
        else:
            engine.load(checkpoint)
        for name, row in engine.compare(reference).items():
            print(table_line(family, seed, name, row, reference))
        if num_programs is None:
            num_programs = engine.num_programs
        assert engine.num_programs == num_programs > 0
