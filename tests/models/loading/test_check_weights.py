"""A checkpoint that does not fit the model is refused, with everything that is wrong."""

from pathlib import Path

import pytest

from models.errors import WeightMismatchError
from models.loading.check_weights import check_weights
from models.loading.safetensors_reader import StoredWeight
from models.weight_rule import Source


def check(stored, wanted, *, ignored=()):
    check_weights(
        {
            name: StoredWeight(path=Path("w"), shape=shape, dtype=dtype)
            for name, (shape, dtype) in stored.items()
        },
        [Source(name=name, shape=(2,)) for name in wanted],
        ignored=ignored,
        where="here",
    )


def test_all_that_does_not_fit_is_named_at_once():
    fits = {"good": ((2,), "F32"), "x.rotary_emb.inv_freq": ((7,), "I8")}
    check(fits, ["good"])
    stored = fits | {"short": ((1,), "BF16"), "packed": ((2,), "I8"), "more": ((2,), "F32")}
    with pytest.raises(WeightMismatchError) as raised:
        check(stored, ["good", "short", "packed", "absent"])
    assert "here: " in str(raised.value) and " good" not in str(raised.value)
    for words in (
        "1 missing: absent.",
        "1 unexpected: more.",
        "1 of the wrong shape: short (got [1], wanted [2]).",
        "1 not of a dtype in F64, F32, F16, BF16: packed (I8).",
    ):
        assert words in str(raised.value)


@pytest.mark.parametrize("shapes", [[(4,), (2,)], [(2,), (4,)]])
def test_every_parameter_of_a_shared_source_says_its_shape(shapes):
    stored = {"packed": StoredWeight(path=Path("w"), shape=(4,), dtype="F32")}
    sources = [Source(name="packed", shape=shape) for shape in shapes]
    with pytest.raises(WeightMismatchError, match=r"packed \(got \[4\], wanted \[2\]\)"):
        check_weights(stored, sources, where="here")


@pytest.mark.parametrize(("num_weights", "end"), [(10, "w09."), (11, "w09 and 1 more.")])
def test_ten_of_a_kind_are_listed_and_the_rest_are_counted(num_weights, end):
    names = [f"w{number:02}" for number in range(num_weights)]
    with pytest.raises(WeightMismatchError, match=rf"{num_weights} missing: w00, .* {end}"):
        check({}, names)


def test_what_may_be_there_is_left_and_nothing_else():
    stored = {"lm_head.weight": ((2,), "F32")}
    check(stored, [], ignored=["lm_head.weight"])
    with pytest.raises(WeightMismatchError, match="unexpected: lm_head.weight"):
        check(stored, [])
    with pytest.raises(WeightMismatchError, match="1 unexpected: other"):
        check(stored | {"other": ((2,), "F32")}, [], ignored=["lm_head.weight"])
