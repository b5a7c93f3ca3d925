"""In bursts of models with states, a row that ends early keeps its keys and values."""

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import load_model
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.runner.shapes import step_buckets
from tests.end_to_end.engine_runs import run
from tests.end_to_end.parity import make_checkpoint
from tests.oracles import families
from tests.paxkv.runner.shared_runners import make_runner

BLOCK_SIZE = 8


def make_request(req_id: str, token_ids: list[int], max_tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, logprobs=1)
    return EngineRequest(request_id=req_id, prompt_token_ids=token_ids, sampling_params=params)


@pytest.mark.slow
def test_a_row_that_ends_first_keeps_its_last_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is full, so later requests find it in the prefix cache."""
    make_checkpoint("qwen3.5", tmp_path, 1, is_shallow=True, is_sharp=True)
    monkeypatch.setattr(step_buckets, "token_buckets", lambda most, verifies_drafts=False: (most,))
    monkeypatch.setattr(step_buckets, "decode_buckets", lambda max_num_seqs: (max_num_seqs,))
    runner = make_runner(load_model(tmp_path, dtype="float32"))
    rng = random.Random(0)
    first, other, ending = ([rng.randrange(3, families.VOCAB) for _ in range(n)] for n in (5, 5, 3))
    # The last drawn token is not computed.
    ends_first = make_request("first", first, 2 * BLOCK_SIZE - len(first) + 1)
    answer = run(runner, [ends_first])[0]["first"]
    text = [*first, *answer.token_ids, *ending]
    truth = run(runner, [make_request("later", text, 6)])[0]["later"]
    # The first of these requests finds a state after one block only. It saves the state after two,
    # which the second finds.
    later = [make_request(f"later{idx}", text, 6) for idx in range(2)]
    requests = [ends_first, make_request("other", other, 30), *later]
    answers, _ = run(runner, requests, caching=True, max_decode_burst=8, arrivals=[40, 60])
    assert answers["first"].token_ids == answer.token_ids
    for request in later:
        found = answers[request.request_id]
        assert found.token_ids == truth.token_ids
        for ours, wanted in zip(found.logprobs, truth.logprobs, strict=True):
            assert ours.token_logprob == pytest.approx(wanted.token_logprob, abs=1e-3)
