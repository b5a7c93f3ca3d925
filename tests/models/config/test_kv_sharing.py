"""Layers that read the keys and values of earlier layers."""

import pytest

from models.config.kv_sharing import read_kv_owners
from models.errors import ModelConfigError

SLIDING, FULL = "sliding_attention", "full_attention"


def test_last_layers_read_the_last_layer_of_their_type_that_has_its_own():
    layer_types = (SLIDING, FULL, SLIDING, SLIDING, FULL)
    owners = read_kv_owners({"num_kv_shared_layers": 2}, layer_types, default_num_shared=0)
    assert owners == [None, None, None, 2, 1]
    assert read_kv_owners({}, layer_types, default_num_shared=0) == [None] * 5
    assert read_kv_owners({}, layer_types, default_num_shared=1)[4] == 1


@pytest.mark.parametrize("num_shared", [2, 3, 4])
def test_every_type_has_a_layer_with_its_own(num_shared):
    with pytest.raises(ModelConfigError, match=f"num_kv_shared_layers={num_shared} of 3 leaves"):
        read_kv_owners(
            {"num_kv_shared_layers": num_shared}, (SLIDING, FULL, FULL), default_num_shared=0
        )
