"""A burst with drafts draws and writes what a burst without drafts does, in fewer steps."""

import numpy as np
import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.runner.programs.drafting_burst import make_drafting_burst
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN, RESULT_WIDTH
from paxkv.runner.shapes.program_shapes import NgramShape
from tests.paxkv.runner.programs.test_burst import MIXED, TinyBursts

NGRAM = NgramShape(num_drafts=3, shortest=1, longest=2)
POSITION = 8
# The requests' last tokens.
TOKENS = [3, 4, 5]
TEMPERATURES = [[SamplingParams(temperature=0.0)] * 3, list(MIXED)]
# Numbers of tokens of three rows and their drafts.
WIDTHS = (4, 12)


def drafting(params, widths=WIDTHS, *, history):
    return TinyBursts(params, widths, make=make_drafting_burst, drafts=NGRAM, history=history)


def history_of(answers_np, *, wrong=()):
    """Tokens before `POSITION` from which a drafter takes the first tokens of each answer.

    Args:
        wrong: Places in the answers where the drafter takes a wrong token.
    """
    history = []
    for token_id, answer in zip(TOKENS, answers_np.T.tolist(), strict=False):
        drafts = [(47 - token if at in wrong else token) for at, token in enumerate(answer[:6])]
        history.append([0, token_id, *drafts][:POSITION])
    return history


@pytest.fixture(params=TEMPERATURES, ids=["greedy", "mixed"])
def params(request):
    return request.param


@pytest.fixture
def plain(params):
    bursts = TinyBursts(params)
    bursts.drawn_np, bursts.last_np = bursts.run([6, 6, 6], tokens=TOKENS, position=POSITION)
    return bursts


# Engines of end-to-end tests have bursts without widths.
@pytest.mark.parametrize("widths", [pytest.param((), marks=pytest.mark.slow), WIDTHS])
def test_right_drafts_are_accepted(params, plain, widths):
    bursts = drafting(params, widths, history=history_of(plain.drawn_np))
    drawn_np, last_np = bursts.run([6, 6, 6], tokens=TOKENS, position=POSITION)
    assert drawn_np.tolist() == plain.drawn_np.tolist()
    assert last_np[:3].tolist() == plain.last_np[:3].tolist()
    # A step with three drafts, and then one or two steps: there is room for one draft.
    for column in bursts.result_np[:, :, RESULT_WIDTH].T.tolist():
        assert column in ([4, 0, 0, 0, 2, 0], [4, 0, 0, 0, 1, 1], [4, 0, 0, 0, 2, 1])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_draws_after_a_wrong_draft_are_drawn_again(params, plain, place):
    history = history_of(plain.drawn_np, wrong=[place])
    bursts = drafting(params, history=history)
    drawn_np, last_np = bursts.run([6, 6, 6], tokens=TOKENS, position=POSITION)
    assert drawn_np.tolist() == plain.drawn_np.tolist()
    assert last_np[:3].tolist() == plain.last_np[:3].tolist()
    starts = bursts.result_np[1 : place + 2, :, RESULT_WIDTH]
    assert (starts[:-1] == 0).all() and (starts[-1] > 0).all()


@pytest.mark.parametrize("wrong", [(), (0,), (1,), (2,)])
@pytest.mark.parametrize("num_tokens", [[6, 6, 6], [1, 2, 6], [3, 6, 4]])
def test_only_the_positions_of_a_burst_without_drafts_are_written(plain, params, num_tokens, wrong):
    """There may be no block after them. A row that has its tokens changes nothing."""
    expected = TinyBursts(params)
    expected_np, _ = expected.run(num_tokens, tokens=TOKENS, position=POSITION)
    history = history_of(plain.drawn_np, wrong=wrong)
    bursts = drafting(params, history=history)
    drawn_np, _ = bursts.run(num_tokens, tokens=TOKENS, position=POSITION)
    assert drawn_np.tolist() == expected_np.tolist()
    np.testing.assert_allclose(bursts.pages_np, expected.pages_np, atol=1e-6)
    assert not bursts.pages_np[:, 0].any()


@pytest.mark.parametrize("first_end", [0, POSITION + 3, POSITION + 4])
def test_a_row_ends_within_accepted_drafts(params, plain, first_end):
    ending = int(plain.drawn_np[2, 0])
    settings = {"tokens": TOKENS, "position": POSITION, "ending": [ending], "first_end": first_end}
    expected_np, expected_last_np = TinyBursts(params).run([6, 6, 6], **settings)
    bursts = drafting(params, history=history_of(plain.drawn_np))
    drawn_np, last_np = bursts.run([6, 6, 6], **settings)
    assert drawn_np.tolist() == expected_np.tolist()
    assert last_np[:3].tolist() == expected_last_np[:3].tolist()
    assert (expected_np[3, 0] == NO_TOKEN) == (first_end <= POSITION + 3)


def test_rows_without_a_request_stay_empty(params, plain):
    bursts = drafting(params[:2], history=history_of(plain.drawn_np)[:2])
    drawn_np, _ = bursts.run([6, 6], tokens=TOKENS[:2], position=POSITION)
    assert drawn_np[:, :2].tolist() == plain.drawn_np[:, :2].tolist()
    assert (bursts.result_np[:, 2] == NO_TOKEN).all()
    assert not bursts.pages_np[:, 7:].any()
