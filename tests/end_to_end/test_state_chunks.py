"""Many requests of a model with states have the answers of each alone.

With more than 8 requests, `advance_states` computes the states of a decode step in chunks of 8
requests. In other steps with at most 16 requests, it reads the states of 16 rows only.
"""

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import load_model
from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.runner.shapes import step_buckets
from tests.end_to_end import engine_runs
from tests.end_to_end.parity import make_checkpoint
from tests.oracles import families
from tests.paxkv.runner import shared_runners

# More than one chunk, and more than the leading rows that prompt steps read; no multiple of either.
MAX_NUM_SEQS = 20
MAX_TOKENS = 12


def make_requests() -> list[EngineRequest]:
    """Prompts with common beginnings. Answers end at different times, in the middle of bursts."""
    rng = random.Random(0)
    beginning = [rng.randrange(3, families.VOCAB) for _ in range(16)]
    return [
        EngineRequest(
            request_id=str(idx),
            prompt_token_ids=[*beginning[: rng.choice([0, 9, 16])], *rng.sample(range(3, 40), 5)],
            sampling_params=SamplingParams(
                max_tokens=rng.randint(3, MAX_TOKENS), ignore_eos=True, temperature=0.0, logprobs=1
            ),
        )
        for idx in range(26)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-next", "bamba", "jamba"])
def test_many_requests_have_the_answers_of_each_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path, 1, is_shallow=True, is_sharp=True)
    for module in (shared_runners, engine_runs):
        monkeypatch.setattr(module, "MAX_NUM_SEQS", MAX_NUM_SEQS)
        monkeypatch.setattr(module, "MAX_NUM_BATCHED_TOKENS", 48)
    # One program of steps and one of bursts, of two widths each.
    monkeypatch.setattr(
        step_buckets, "token_buckets", lambda most, verifies_drafts=False: (most // 2, most)
    )
    monkeypatch.setattr(step_buckets, "decode_buckets", lambda max_num_seqs: (8, max_num_seqs))
    cache = CacheConfig(block_size=8, num_gpu_blocks_override=800)
    runner = shared_runners.make_runner(load_model(tmp_path, dtype="float32"), cache)
    requests = make_requests()
    truth = {r.request_id: engine_runs.run(runner, [r])[0][r.request_id] for r in requests}
    for seed in range(3):
        rng = random.Random(seed)
        answers, _ = engine_runs.run(
            runner,
            rng.sample(requests, len(requests)),
            caching=True,
            is_async=seed == 1,
            max_decode_burst=(1, 4, 8)[seed],
            arrivals=sorted(rng.choices(range(12), k=8)),
        )
        for req_id, wanted in truth.items():
            assert answers[req_id].token_ids == wanted.token_ids, (seed, req_id)
            for ours, alone in zip(answers[req_id].logprobs, wanted.logprobs, strict=True):
                assert ours.token_logprob == pytest.approx(alone.token_logprob, abs=1e-3)
