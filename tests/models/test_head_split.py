"""Each device of a mesh gets its own heads, and copies of heads that several devices share."""

import numpy as np
import pytest

from models.head_split import HeadRange, HeadSplit, num_parts


def split_of(num_heads: int, num_shared: int) -> HeadSplit:
    """Ranges of heads of 2 entries, of shared heads of 3, and of one that all heads use."""
    ranges = (
        HeadRange(num_heads=num_heads, head_dim=2),
        HeadRange(num_heads=num_shared, head_dim=3),
    )
    return HeadSplit(
        ranges=(*ranges, HeadRange(num_heads=1, head_dim=1)),
        heads_of_layer=(num_heads, num_shared),
    )


def test_a_device_has_its_heads_of_every_range():
    order = split_of(4, 2).order(2).reshape(2, -1)
    assert order[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 14]
    assert order[1].tolist() == [4, 5, 6, 7, 11, 12, 13, 14]


@pytest.mark.parametrize(("num_heads", "num_shared", "num_devices"), [(8, 2, 8), (4, 1, 4)])
def test_a_device_has_the_shared_heads_of_its_heads(num_heads, num_shared, num_devices):
    heads = split_of(num_heads, num_shared)
    # For each entry, the shared head that belongs to it.
    own = np.repeat(np.arange(num_heads) * num_shared // num_heads, 2)
    shared = np.concatenate([own, np.repeat(np.arange(num_shared), 3), [-1]])
    for device_order in heads.order(num_devices).reshape(num_devices, -1):
        assert len(set(shared[device_order]) - {-1}) == 1
    sizes = {heads.size_on_each_of(num_devices)}
    assert sizes == {len(heads.order(num_devices)) // num_devices}
    assert set(heads.order(num_devices)) == set(range(heads.size))


@pytest.mark.parametrize(
    ("heads_of_layer", "num_devices"), [((6, 3), 4), ((12, 6), 4), ((4, 4), 8), ((4, 2), 1)]
)
def test_heads_that_do_not_divide_stay_whole(heads_of_layer, num_devices):
    assert num_parts(heads_of_layer, num_devices) == 1
    heads = split_of(*heads_of_layer)
    assert not heads.is_split(num_devices)
    np.testing.assert_array_equal(heads.order(num_devices), np.arange(heads.size))
