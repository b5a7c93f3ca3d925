"""Masks, bad words, biases and penalties equal slow NumPy code, next to any other rows."""

import dataclasses
import itertools
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.config.sampling_params import MAX_LOGIT_BIASES, SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.runner.sampling.logits_processors import needs_processing, process_logits
from paxkv.runner.sampling.row_state import (
    allocate_row_state,
    pack_row,
    processors_of,
    vocab_words,
    write_row,
)
from paxkv.runner.sampling.sampling_columns import decode_processors, encode_sampling_params
from paxkv.runner.shapes.program_shapes import RowShape
from paxkv.runner.shapes.sampling_row import NUM_COLUMNS, ROW, step_row_width
from paxkv.scheduler.request import Request
from tests.paxkv.runner.logits_truth import true_logits
from tests.quick_compile import quick_jit

# Not multiples of 32, nor of the pieces in which a history is counted.
VOCAB, MAX_MODEL_LEN, NUM_ROWS = 70, 600, 3
PROCESS = quick_jit(process_logits)
WRITE = quick_jit(write_row)
DECODE = quick_jit(decode_processors)
NEEDS_PROCESSING = quick_jit(needs_processing)
TOKEN = st.integers(0, VOCAB - 1)


@dataclasses.dataclass(kw_only=True)
class Case:
    """A request that has these tokens and draws its next one."""

    params: SamplingParams
    prompt: list[int]
    outputs: list[int] = dataclasses.field(default_factory=list)
    bad_words: tuple[tuple[int, ...], ...] = ()
    early_end_ids: tuple[int, ...] = ()
    grammar: list[int] | None = None

    def expected(self, logits_np):
        return true_logits(
            logits_np,
            self.params,
            self.prompt,
            self.outputs,
            bad_words=self.bad_words,
            early_end_ids=self.early_end_ids,
            grammar=self.grammar,
        )


def packed_row(case, row_idx):
    return pack_row(
        row_idx,
        np.array([*case.prompt, *case.outputs], np.int32),
        case.params,
        bad_words_token_ids=case.bad_words,
        early_end_ids=case.early_end_ids,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB,
    )


def sampling_row(case, row_idx):
    row_np = np.zeros(step_row_width(1), np.int32)
    row_np[:NUM_COLUMNS] = encode_sampling_params(
        case.params,
        seed=0,
        vocab_size=VOCAB,
        num_prompt_tokens=len(case.prompt),
        processors=processors_of(
            case.params, case.bad_words, needs_grammar=case.grammar is not None
        ),
    )
    row_np[ROW] = row_idx
    row_np[NUM_COLUMNS] = len(case.prompt) + len(case.outputs)
    return row_np


def mask_row(case):
    row_np = np.zeros(1 + vocab_words(VOCAB), np.int32)
    if case.grammar is not None:
        row_np[0] = 1
        for token_id in case.grammar:
            row_np[1 + token_id // 32] |= np.int64(1 << token_id % 32).astype(np.int32)
    return row_np


def process(cases, logits_np):
    """The logits after processing; case i is row i of the logits, and another row of the state."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = RowShape(num_rows=NUM_ROWS, max_model_len=MAX_MODEL_LEN)
    state = allocate_row_state(shape, VOCAB, sharding)
    # The earlier content of a row must not matter.
    state = jax.tree.map(lambda array: np.asarray(array) + 1, state)
    rows = [NUM_ROWS - 1 - i for i in range(len(cases))]
    for case, row_idx in zip(cases, rows, strict=True):
        state = WRITE(state, packed_row(case, row_idx))
    sampling_np = np.stack([sampling_row(c, row) for c, row in zip(cases, rows, strict=True)])
    inputs = DECODE(sampling_np)
    mask_np = np.stack([mask_row(case) for case in cases])
    return np.asarray(PROCESS(logits_np, inputs, state, mask_np)), inputs, mask_np


def check(cases, seed=0):
    rng = np.random.default_rng(seed)
    logits_np = rng.normal(size=(len(cases), VOCAB), scale=3).astype(np.float32)
    processed_np, _, _ = process(cases, logits_np)
    for case, row_np, result_np in zip(cases, logits_np, processed_np, strict=True):
        np.testing.assert_allclose(result_np, case.expected(row_np), rtol=2e-6, atol=2e-5)


FIELDS = {
    "presence": Case(
        params=SamplingParams(presence_penalty=0.7), prompt=[1, 2], outputs=[3, 3, 3, 9]
    ),
    "frequency": Case(
        params=SamplingParams(frequency_penalty=-0.5), prompt=[1, 2], outputs=[3, 3, 3, 9]
    ),
    "repetition": Case(
        params=SamplingParams(repetition_penalty=1.3), prompt=[1, 2, 69], outputs=[3, 0, 3]
    ),
    "bias": Case(params=SamplingParams(logit_bias={0: 5.0, 69: -100, 31: 0.25}), prompt=[4]),
    "many_biases": Case(
        params=SamplingParams(logit_bias={i: i / 7 - 3 for i in range(VOCAB)}), prompt=[4]
    ),
    "allowed": Case(params=SamplingParams(allowed_token_ids=[0, 31, 32, 69]), prompt=[4]),
    "grammar": Case(params=SamplingParams(), prompt=[4], grammar=[31, 32, 63, 64]),
    "min_tokens": Case(
        params=SamplingParams(min_tokens=3), prompt=[4], outputs=[5, 6], early_end_ids=(1, 69)
    ),
    "min_tokens_passed": Case(
        params=SamplingParams(min_tokens=2), prompt=[4], outputs=[5, 6], early_end_ids=(1, 69)
    ),
    "bad_words": Case(
        params=SamplingParams(),
        prompt=[8, 7],
        outputs=[5, 6, 7],
        # The last but one begins in the prompt, where it does not count.
        bad_words=((9,), (7, 1), (6, 7, 2), (5, 7, 3), (8, 7, 5, 6, 7, 4), (5, 6, 7, 0)),
    ),
    "bad_words_of_prompt": Case(
        params=SamplingParams(), prompt=[8, 7], bad_words=((7, 1), (8, 7, 2))
    ),
}


def test_as_many_biases_as_are_allowed(monkeypatch):
    """After them, the row of biases has no padding that an iteration too many would read."""
    monkeypatch.setattr(sys.modules[__name__], "VOCAB", MAX_LOGIT_BIASES)
    biases = {token_id: token_id / 11 - 40 for token_id in range(MAX_LOGIT_BIASES)}
    check([Case(params=SamplingParams(logit_bias=biases), prompt=[4])])


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_is_right_together_with_others(name):
    case = FIELDS[name]
    plain = Case(params=SamplingParams(), prompt=[1, 2, 3])
    other = Case(
        params=SamplingParams(presence_penalty=1, logit_bias={3: 1.0}, min_tokens=5, max_tokens=9),
        prompt=[5],
        outputs=[6, 7],
        bad_words=((6,), (7, 8)),
        early_end_ids=(2,),
        grammar=[1, 2, 3, 4],
    )
    check([case])
    check([plain, case, other])
    check([other, case, plain])


def test_row_without_any_field_keeps_its_bits_next_to_a_row_with_all():
    logits_np = np.random.default_rng(1).normal(size=(3, VOCAB)).astype(np.float32)
    plain = Case(params=SamplingParams(), prompt=[1, 2, 3], outputs=[4, 4])
    processed_np, inputs, mask_np = process([plain, FIELDS["repetition"], plain], logits_np)
    kept_np, given_np = processed_np[[0, 2]], logits_np[[0, 2]]
    np.testing.assert_array_equal(kept_np.view(np.int32), given_np.view(np.int32))
    assert bool(NEEDS_PROCESSING(inputs, mask_np))
    _, inputs, mask_np = process([plain, plain, plain], logits_np)
    assert not bool(NEEDS_PROCESSING(inputs, mask_np))


def test_row_that_draws_nothing_needs_no_processing():
    row_np = sampling_row(FIELDS["repetition"], 0)
    row_np[NUM_COLUMNS] = 0
    inputs = DECODE(row_np[None])
    mask_np = np.zeros((1, 1 + vocab_words(VOCAB)), np.int32)
    assert not bool(NEEDS_PROCESSING(inputs, mask_np))


@st.composite
def cases(draw):
    max_prompt = draw(st.sampled_from([4, 300]))
    word = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)
    penalty = st.floats(-2, 2, width=32)
    return Case(
        params=SamplingParams(
            max_tokens=400,
            min_tokens=draw(st.integers(0, 4)),
            presence_penalty=draw(st.just(0.0) | penalty),
            frequency_penalty=draw(st.just(0.0) | penalty),
            repetition_penalty=draw(st.just(1.0) | st.floats(0.5, 2, width=32)),
            logit_bias=draw(st.none() | st.dictionaries(TOKEN, st.floats(-100, 100, width=32))),
            allowed_token_ids=draw(st.none() | st.lists(TOKEN, min_size=1)),
        ),
        prompt=draw(st.lists(st.integers(0, 9), min_size=1, max_size=max_prompt)),
        # Few different tokens, so that bad words do occur.
        outputs=draw(st.lists(st.integers(0, 5), max_size=max_prompt - 1)),
        bad_words=tuple(draw(st.lists(word, max_size=5))),
        early_end_ids=tuple(draw(st.lists(TOKEN, max_size=3))),
        grammar=draw(st.none() | st.lists(TOKEN, min_size=1)),
    )


@given(rows=st.lists(cases(), min_size=NUM_ROWS, max_size=NUM_ROWS), seed=st.integers(0, 1000))
def test_any_fields_together_equal_the_truth(rows, seed):
    check(rows, seed)


def test_the_host_knows_when_no_token_is_left():
    """Compares the host with the device's masks after every output of up to three tokens."""
    words = ((7, 7), (7, 9, 7), (9, 7, 9), (9, 9, 9), (40, 5))
    params = SamplingParams(allowed_token_ids=[7, 9], min_tokens=2, stop_token_ids=[9])
    outputs = [list(tokens) for num in range(4) for tokens in itertools.product((7, 9), repeat=num)]
    is_left = []
    for output in outputs:
        request = Request(
            EngineRequest(
                request_id="r",
                prompt_token_ids=[9, 7],
                sampling_params=params,
                bad_words_token_ids=words,
                scarce_token_ids=(7, 9),
            ),
            max_num_tokens=20,
        )
        request.append_output_tokens(output)
        is_left.append(request.has_token_left())
    cases = [
        Case(params=params, prompt=[9, 7], outputs=output, bad_words=words, early_end_ids=(9,))
        for output in outputs
    ]
    for start in range(0, len(cases), NUM_ROWS):
        part = cases[start : start + NUM_ROWS]
        processed_np, _, _ = process(part, np.zeros((len(part), VOCAB), np.float32))
        assert np.isfinite(processed_np).any(axis=1).tolist() == is_left[start : start + NUM_ROWS]
    assert {True, False} == set(is_left)
