"""The dense NumPy oracle agrees with the golden numbers of transformers."""

import numpy as np
import pytest

from tests.oracles.dense_model import dense_logits
from tests.oracles.golden import load_golden
from tests.oracles.recipes import RECIPES, write_recipe


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_dense_model_equals_golden_numbers(recipe, tmp_path):
    folder = write_recipe(tmp_path, recipe)
    for sequence in load_golden(recipe):
        logits = dense_logits(folder, sequence.prompt + sequence.new_tokens[:-1])
        difference = np.abs(logits[sequence.positions] - sequence.logits).max()
        assert difference <= 1e-5 * np.abs(logits).max()
