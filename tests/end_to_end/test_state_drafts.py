"""Models with states verify drafts: no answer changes, whatever else the engine does."""

import dataclasses
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import Pages, load_model
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import MambaSpec
from paxkv.runner import ModelRunner, model_runner
from paxkv.runner.features.feature_list import make_features
from paxkv.runner.programs import drafting_burst
from paxkv.runner.programs.loop_drafters.base import DraftedRows, LoopDrafter
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.shapes import step_buckets
from tests.end_to_end.engine_runs import run
from tests.end_to_end.parity import make_checkpoint
from tests.oracles import families
from tests.paxkv.runner.features.oracle_drafter import OracleDrafter
from tests.paxkv.runner.shared_runners import MAX_MODEL_LEN, make_runner

MAX_TOKENS = 14
NUM_RUNS = 6


def make_requests() -> list[EngineRequest]:
    """Prompts with common beginnings, greedy and sampled; the last two fork from the first."""
    rng = random.Random(1)
    beginning = [rng.randrange(3, families.VOCAB) for _ in range(18)]
    requests = []
    for idx, (num_shared, num_own) in enumerate([(18, 3), (18, 7), (16, 1), (5, 0), (9, 8)]):
        own = [rng.randrange(3, families.VOCAB) for _ in range(num_own)]
        sampled = {"temperature": 1.0, "seed": idx, "top_k": 3} if idx % 2 else {"temperature": 0.0}
        requests.append(
            EngineRequest(
                request_id=str(idx),
                prompt_token_ids=beginning[:num_shared] + own,
                sampling_params=SamplingParams(
                    max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1, **sampled
                ),
            )
        )
    source = dataclasses.replace(requests[0], request_id="source", keep_blocks=True)
    forks = [
        dataclasses.replace(requests[0], request_id=f"fork{idx}", fork_from="source")
        for idx in range(2)
    ]
    return [*requests, source, *forks]


# In the normal run, `test_state_head_drafts.py` makes the same comparison for Qwen3.5 and its head.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-next", "bamba", "kimi-linear", "jamba"])
def test_drafts_change_no_answer(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path, 1, is_shallow=True, is_sharp=True)
    drafter = OracleDrafter()
    propose_by(drafter, monkeypatch)
    check_drafts(make_runner(load_model(tmp_path, dtype="float32")), drafter)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3.5", "bamba"])
def test_drafts_change_no_bits_of_batch_invariant_steps(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiles so small that drafts of most steps do not fit into the rest of a tile."""
    make_checkpoint(family, tmp_path, 1, is_shallow=True, is_sharp=True)
    drafter = OracleDrafter()
    propose_by(drafter, monkeypatch)
    monkeypatch.setattr(step_buckets, "INVARIANT_TILE_TOKENS", 5)
    model = load_model(tmp_path, dtype="float32")
    runner = make_runner(model, runner_config=RunnerConfig(batch_invariant=True))
    check_drafts(runner, drafter, same_bits=True)


@dataclasses.dataclass(frozen=True)
class OracleLoopDrafter(LoopDrafter):
    """Proposes inside bursts the tokens that follow in the text of a row. Some are changed.

    Args:
        texts: Prompts and answers, with -1 after their ends.
    """

    texts: jax.Array  # i32[num_texts, num_tokens]
    num_drafts: int = OracleDrafter.max_drafts

    def propose(
        self, drafted: DraftedRows, pages: Pages, memory: object
    ) -> tuple[jax.Array, Pages]:
        def propose_for(token_ids: jax.Array, last: jax.Array) -> jax.Array:
            places = jnp.arange(self.texts.shape[1])
            is_same = (token_ids[: len(places)] == self.texts) | (places > last)
            text = self.texts[jnp.argmax(is_same.all(axis=1))]
            after = last + 1 + jnp.arange(self.num_drafts)
            return text.at[after].get(mode="fill", fill_value=-1) + (after % 4 == 0)

        drafts = jax.vmap(propose_for)(drafted.token_ids, drafted.positions)
        return jnp.where(drafts > 0, drafts, NO_TOKEN), pages


@pytest.mark.parametrize(
    "family", ["qwen3.5", *(pytest.param(f, marks=pytest.mark.slow) for f in ("bamba", "jamba"))]
)
def test_drafts_in_bursts_change_no_answer(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path, 1, is_shallow=True, is_sharp=True)
    drafter = OracleDrafter()
    propose_by(None, monkeypatch)

    def make_drafter(*args: object) -> OracleLoopDrafter:
        texts_np = np.full((len(drafter.truth), MAX_MODEL_LEN), -1, np.int32)
        for text_np, request in zip(texts_np, make_requests(), strict=True):
            text = [*request.prompt_token_ids, *drafter.truth[request.request_id]]
            text_np[: len(text)] = text
        return OracleLoopDrafter(jnp.asarray(texts_np))

    monkeypatch.setattr(drafting_burst, "make_loop_drafter", make_drafter)
    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=OracleDrafter.max_drafts,
        drafts_in_bursts=True,
        adapts_drafts=False,
    )
    config = RunnerConfig(speculative_config=speculative)
    runner = make_runner(load_model(tmp_path, dtype="float32"), runner_config=config)
    check_drafts(runner, drafter, max_decode_burst=8)


def propose_by(drafter: OracleDrafter | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the drafter, if any, to runners, which get one program of steps and one of bursts."""
    added = () if drafter is None else (drafter,)
    monkeypatch.setattr(model_runner, "make_features", lambda *args: make_features(*args) + added)
    monkeypatch.setattr(step_buckets, "token_buckets", lambda most, verifies_drafts=False: (most,))
    monkeypatch.setattr(step_buckets, "decode_buckets", lambda max_num_seqs: (max_num_seqs,))


def num_tiny_blocks(runner: ModelRunner) -> int:
    """Blocks of a pool so small that requests are preempted: too few for two of the longest."""
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    num_slot_blocks = sum(spec.num_slot_blocks for spec in specs if isinstance(spec, MambaSpec))
    num_attention = sum(not isinstance(spec, MambaSpec) for spec in specs)
    # The null block, slots of two requests, and 4/3 of the other blocks of the longest request.
    return 1 + 2 * num_slot_blocks + num_attention * MAX_MODEL_LEN // 8 * 4 // 3


def check_drafts(
    runner: ModelRunner,
    drafter: OracleDrafter,
    *,
    same_bits: bool = False,
    max_decode_burst: int = 1,
) -> None:
    """Compares answers of busy engines with those of each request alone, without drafts.

    Args:
        same_bits: Log-probabilities must be equal too.
    """
    requests = make_requests()
    truth = {
        request.request_id: run(runner, [request])[0][request.request_id] for request in requests
    }
    drafter.truth = {req_id: answer.token_ids for req_id, answer in truth.items()}
    num_tiny = num_tiny_blocks(runner)
    num_preempted = num_accepted = 0
    for seed in range(NUM_RUNS):
        rng = random.Random(seed)
        drafter.wrong_rate = (0.0, 0.3, 0.6)[seed % 3]
        aborted = str(rng.randrange(5))
        is_tiny = seed % 2 == 1
        # Bursts run only while no request waits, so bursts are tested with few requests.
        sampled = rng.sample(requests[:5], 3) if max_decode_burst > 1 else requests
        sampled = rng.sample(sampled, len(sampled))
        answers, num_preemptions = run(
            runner,
            sampled,
            max_drafts=OracleDrafter.max_drafts,
            is_async=rng.random() < 0.5,
            num_blocks=num_tiny if is_tiny else None,
            caching=rng.random() < 0.7,
            arrivals=sorted(rng.choices(range(20), k=len(sampled) - 2)),
            aborts=[(rng.randrange(30), aborted)],
            max_decode_burst=max_decode_burst,
        )
        for req_id, answer in answers.items():
            num_wanted = len(answer.token_ids) if req_id == aborted else None
            assert answer.token_ids == truth[req_id].token_ids[:num_wanted], (seed, req_id)
            if same_bits:
                assert answer.logprobs == truth[req_id].logprobs[:num_wanted], (seed, req_id)
        num_preempted += num_preemptions
        num_accepted += sum(answer.num_accepted_tokens for answer in answers.values())
    assert num_accepted > NUM_RUNS * MAX_TOKENS / (1 if max_decode_burst == 1 else 2)
    assert num_preempted > 0
