"""transformers in small, on the CPU: every measurement works there as it is asked for."""

import pytest

from benchmarks.gpu.sizes import MODEL_CONFIGS
from benchmarks.gpu.units import TRANSFORMERS, all_units


@pytest.mark.slow  # importing transformers alone takes seconds
@pytest.mark.parametrize("model", MODEL_CONFIGS)
def test_every_measurement_gives_figures(model):
    pytest.importorskip("torch")
    from benchmarks.gpu.torch_subject import TorchSubject

    subject = TorchSubject(model=model, is_rehearsal=True)
    measures = set()
    for unit in all_units(is_rehearsal=True):
        if (unit.op, unit.body) == (model, TRANSFORMERS):
            seed = {} if unit.measure == "load" else {"seed": 0}
            fields = getattr(subject, unit.measure)(**unit.options, **seed)
            assert all(value > 0 for values in fields["figures"].values() for value in values)
            measures.add(unit.measure)
    assert measures == {
        "load",
        "decode",
        "first_token",
        "continuous_batching",
        "static_batches",
    }
