"""How far two results are apart."""

import numpy as np
import pytest

from models.cache.self_test import relative_error


def test_relative_error_is_of_norms():
    assert relative_error(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == pytest.approx(0.2)
    assert relative_error(np.zeros(2), np.zeros(2)) == 0.0
