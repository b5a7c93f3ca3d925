"""What the host takes from a mask is what the device takes from the logits."""

import itertools

import numpy as np

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.structured_output.token_limits import TokenLimits, token_bits

VOCAB_SIZE, EOS = 64, 2


def _limits(*, bad_words=(), **params):
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(**params),
        eos_token_ids=(EOS,),
        bad_words_token_ids=bad_words,
    )
    return TokenLimits(request, VOCAB_SIZE // 32)


def _left(limits):
    mask_np = np.full(VOCAB_SIZE // 32, -1, np.int32)
    limits.narrow(mask_np)
    return set(np.flatnonzero(np.unpackbits(mask_np.view(np.uint8), bitorder="little")).tolist())


def test_bits_of_forbidden_tokens_match_the_masks():
    assert token_bits([0, 31, 33], 2).tolist() == [-(2**31) + 1, 2]


def test_without_settings_every_token_is_allowed():
    assert _left(_limits()) == set(range(VOCAB_SIZE))


def test_allowed_tokens_and_bad_words_of_one_token_limit_a_grammar():
    limits = _limits(allowed_token_ids=[5, 6, 40], bad_words=((6,), (9,)))
    assert _left(limits) == {5, 40}


def test_ends_come_after_min_tokens():
    limits = _limits(min_tokens=2, stop_token_ids=[7])
    assert _left(limits) == set(range(VOCAB_SIZE)) - {EOS, 7}
    limits.advance([EOS])  # as where it is ignored
    assert EOS not in _left(limits)
    limits.advance([8])
    assert _left(limits) == set(range(VOCAB_SIZE))


def test_the_last_token_of_a_bad_word_is_banned_after_the_others():
    words = ((3, 4), (4, 4, 5), (4, 6))
    for drawn in itertools.product((3, 4), repeat=4):
        limits = _limits(bad_words=words)
        for num_drawn in range(5):
            output = (0, *drawn[:num_drawn])
            banned = {w[-1] for w in words if output[-len(w) + 1 :] == w[:-1]}
            assert _left(limits) == set(range(VOCAB_SIZE)) - banned
            limits.advance(drawn[num_drawn : num_drawn + 1])
