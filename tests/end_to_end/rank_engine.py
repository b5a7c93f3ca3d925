"""One of the two processes of an engine, which uses the CPU devices of both.

The arguments are a case, the rank, and two addresses. Rank 0 checks the tokens.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax

from paxkv.contracts.rank_place import RankPlace
from paxkv.runner.memory.device_mesh import find_mesh
from paxkv.runner.ranks.join_group import join_group
from paxkv.runner.ranks.rank_group import Follower, RankGroup
from tests.end_to_end.engine_harness import RecordingRunner, RunResult, returned_logits, run_engine
from tests.end_to_end.golden_runs import GREEDY, check_against
from tests.end_to_end.split_collectives import check_collectives
from tests.end_to_end.split_configs import CONFIGS, LIMITS, PARAMS, PROMPTS, SETTINGS
from tests.end_to_end.split_drafters import METHODS, make_drafting_runner, run_with_drafts
from tests.engine_compilations import quick_engine_compilations
from tests.oracles.serving_golden import load_serving_golden, write_serving_recipe

NUM_RANKS = 2


def main(case: str, rank: str, coordinator: str, calls_endpoint: str) -> None:
    group = join_group(
        RankPlace(
            rank=int(rank),
            num_ranks=NUM_RANKS,
            coordinator=coordinator,
            calls_endpoint=calls_endpoint,
            timeout_s=600,
        )
    )
    try:
        _check(case, group)
    finally:
        # After a failed check too: JAX lets no process exit before the follower does.
        group.end()


def _check(case: str, group: RankGroup) -> None:
    """Runs the engine of one rank. Rank 0 prints "same" if its answers are right."""
    if case in METHODS:
        runner = make_drafting_runner(case, find_mesh(jax.device_count()), group)
        if isinstance(group, Follower):
            runner.follow()
            return
        found = run_with_drafts(runner, case)
        assert found == run_with_drafts(make_drafting_runner(case, None), case)
        print("same")
        return
    folder, options = Path(tempfile.mkdtemp()), dict(LIMITS)
    if case in CONFIGS:
        (folder / "config.json").write_text(json.dumps(CONFIGS[case]))
        options["load_format"] = "dummy"
    else:
        write_serving_recipe(folder, case)
    recording = RecordingRunner(
        folder, 16, group=group, mesh=find_mesh(jax.device_count()), **options
    )
    if isinstance(group, Follower):
        with returned_logits(recording.vocab_size):
            recording.runner.follow()
        return
    if case in CONFIGS:
        found = _run_drawing(recording)
        expected = _run_drawing(RecordingRunner(folder, 16, **options))
        assert found.token_ids == expected.token_ids, (found.token_ids, expected.token_ids)
    else:
        golden = load_serving_golden(case)
        prompts = [g.prompt for g in golden]
        result = run_engine(recording, prompts, SETTINGS, sampling_params=GREEDY)
        check_against(golden, result)
        assert sum(result.num_cached_tokens) > 0
        check_collectives(recording)
    print("same")


def _run_drawing(recording: RecordingRunner) -> RunResult:
    return run_engine(recording, PROMPTS, SETTINGS, sampling_params=PARAMS)


if __name__ == "__main__":
    with quick_engine_compilations():
        main(*sys.argv[1:])
