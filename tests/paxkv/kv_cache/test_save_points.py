"""Prompts with a common beginning share it in models with states, wherever it ends."""

import random

import pytest

from paxkv.contracts.kv_cache_spec import FullAttentionSpec, MambaSpec
from paxkv.kv_cache.save_points import SavePoints
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.scheduler import Scheduler
from tests.paxkv.kv_cache.cache_fakes import FakeRequest
from tests.paxkv.scheduler.stepping import FunctionRunner, add, continuation, make_scheduler, step

BLOCK_SIZE = 16
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
STATES = MambaSpec(
    block_size=BLOCK_SIZE,
    page_bytes=FULL.page_size_bytes,
    state_bytes=2 * FULL.page_size_bytes,
    blocks_per_state=2,
    num_parts=3,
)
NUM_REQUESTS, NUM_BLOCKS = 12, 1500


POINTS = SavePoints(block_size=BLOCK_SIZE)
ONLY_FORKS = SavePoints(block_size=None)


def points_of(request, save_points):
    return [n for n in range(130) if save_points.contains(request, n)]


def test_steps_end_where_the_state_is_saved():
    request = FakeRequest("r", range(100))
    request.state_save_at = 32
    assert points_of(request, POINTS) == [32, 96, 112, 128]
    assert points_of(request, ONLY_FORKS) == []
    request.num_leading_tokens = 50
    assert points_of(request, POINTS) == [32, 48, 96, 112, 128]
    assert POINTS.cut(request, 32, 68) == 16
    request.num_leading_tokens = 15
    cuts = [POINTS.cut(request, start, 100 - start) for start in (0, 32, 96)]
    assert cuts == [32, 64, 4]
    assert ONLY_FORKS.cut(request, 0, 100) == 100
    request.keeps_state_for_forks = True
    assert POINTS.cut(request, 96, 4) == 3
    assert ONLY_FORKS.cut(request, 0, 100) == 99


def test_drafts_end_before_the_request_could_pass_a_multiple():
    request = FakeRequest("r", range(109))
    cuts = [POINTS.cut(request, 107, num, has_drafts=True) for num in (3, 4, 5, 9)]
    # The two drafts at 109 and 110 are right: then 112 tokens are known.
    assert cuts == [3, 4, 4, 4]
    assert ONLY_FORKS.cut(request, 107, 9, has_drafts=True) == 9
    every = SavePoints(block_size=BLOCK_SIZE, interval=16)
    for num_tokens, num_drafts in ((111, 0), (112, 9), (113, 9)):
        request = FakeRequest("r", range(num_tokens))
        num_new = 1 + 9
        assert every.cut(request, num_tokens - 1, num_new, has_drafts=True) == 1 + num_drafts


def test_long_prompts_save_at_every_interval():
    request = FakeRequest("r", range(100))
    save_points = SavePoints(block_size=BLOCK_SIZE, interval=32)
    assert points_of(request, save_points) == [32, 64, 96, 112, 128]
    cuts = [save_points.cut(request, start, 100 - start) for start in (0, 31, 32, 96)]
    assert cuts == [32, 1, 32, 4]


def test_steps_between_two_multiples_have_nothing_to_save():
    request = FakeRequest("r", range(20))
    limits = []
    for request.num_computed_tokens in (0, 1, 16, 17):
        limits.append(POINTS.max_tokens_before(request))
    assert limits == [0, 16, 16, 32]
    request.num_computed_tokens = 16
    assert POINTS.max_tokens_before(request, is_step_decided=True) == 32
    request.keeps_state_for_forks = True
    assert ONLY_FORKS.max_tokens_before(request) == 19
    request.num_computed_tokens = 19
    assert POINTS.max_tokens_before(request) == 19
    assert POINTS.max_tokens_before(request, is_step_decided=True) == 32


def make(scheduler_class=Scheduler, **settings):
    return make_scheduler(
        scheduler_class,
        specs=(FULL, STATES),
        num_blocks=NUM_BLOCKS,
        max_model_len=2048,
        **{"max_num_seqs": NUM_REQUESTS, "max_num_batched_tokens": 512} | settings,
    )


def prompts_with_beginning(num_shared):
    """Prompts with one beginning and unlike endings of 5 to 200 tokens."""
    rng = random.Random(num_shared)
    beginning = [rng.randrange(1000) for _ in range(num_shared)]
    return [
        beginning + [1000 * (i + 1) + k for k in range(rng.randint(5, 200))]
        for i in range(NUM_REQUESTS)
    ]


def run_until_end(scheduler, runner, *, max_decode_steps=1):
    for _ in range(2000):
        if not scheduler.has_unfinished_requests():
            return
        step(scheduler, runner, max_decode_steps=max_decode_steps)
    raise AssertionError("requests that never end")


@pytest.mark.parametrize("num_shared", [300, 400])
def test_prompts_sent_one_after_another_share_their_beginning(num_shared):
    scheduler, runner = make(), FunctionRunner()
    num_found = []
    for i, prompt in enumerate(prompts_with_beginning(num_shared)):
        request = add(scheduler, f"r{i}", prompt, max_tokens=4)
        run_until_end(scheduler, runner)
        scheduler.check_invariants()
        assert request.all_token_ids[len(prompt) :] == continuation(prompt, 4)
        num_found.append(request.num_cached_tokens)
    # The second prompt shows where the beginning ends, and its state is saved there.
    assert num_found == [0, 0] + [num_shared // BLOCK_SIZE * BLOCK_SIZE] * (NUM_REQUESTS - 2)
    first, second, third = (scheduler.explain_prefix_cache_miss(f"r{i}") for i in range(3))
    assert (first.reason, first.kind) == ("first_block_differs", "full_attention")
    assert (second.reason, second.kind) == ("state_not_saved", "state")
    assert (second.block_idx + 1) * second.block_size == num_found[2]
    assert (third.reason, third.kind) == ("block_differs", "full_attention")


@pytest.mark.parametrize("num_shared", [300, 400])
def test_only_the_first_of_several_chats_computes_their_leading_messages(num_shared):
    scheduler, runner = make(), FunctionRunner()
    num_found, num_steps = [], []
    for i, prompt in enumerate(prompts_with_beginning(num_shared)):
        request = add(scheduler, f"r{i}", prompt, max_tokens=4, num_leading_tokens=num_shared)
        num_before = scheduler.num_steps
        run_until_end(scheduler, runner)
        scheduler.check_invariants()
        assert request.all_token_ids[len(prompt) :] == continuation(prompt, 4)
        num_found.append(request.num_cached_tokens)
        num_steps.append(scheduler.num_steps - num_before)
    assert num_found == [0] + [num_shared // BLOCK_SIZE * BLOCK_SIZE] * (NUM_REQUESTS - 1)
    # The other prompts are not cut there: three tokens after the first, and the end of the prompt.
    assert num_steps[0] == 6 and set(num_steps[1:]) <= {4, 5}


def test_with_an_interval_the_second_of_several_prompts_shares_most_of_their_beginning():
    # 100 tokens are rounded up to 112, so the states are those after 112, 224 and 336 tokens.
    scheduler, runner = make(state_save_interval=100), FunctionRunner()
    num_found = []
    for i, prompt in enumerate(prompts_with_beginning(400)[:4]):
        request = add(scheduler, f"r{i}", prompt, max_tokens=4)
        run_until_end(scheduler, runner)
        scheduler.check_invariants()
        assert request.all_token_ids[len(prompt) :] == continuation(prompt, 4)
        num_found.append(request.num_cached_tokens)
    assert num_found == [0, 336, 400, 400]


@pytest.mark.parametrize("num_shared", [300, 400])
def test_prompts_sent_at_once_miss_only_in_the_first_two_steps(num_shared):
    scheduler, runner = make(), FunctionRunner()
    prompts = prompts_with_beginning(num_shared)
    requests = [add(scheduler, f"r{i}", prompt, max_tokens=4) for i, prompt in enumerate(prompts)]
    num_admitted = 0
    for _ in range(2):
        num_admitted += len(step(scheduler, runner).scheduled_new_reqs)
    run_until_end(scheduler, runner)
    num_found = [request.num_cached_tokens for request in requests]
    assert num_admitted < 8
    assert all(num >= num_shared // BLOCK_SIZE * BLOCK_SIZE for num in num_found[num_admitted:])


@pytest.mark.parametrize("num_answered", [3, BLOCK_SIZE - 1, BLOCK_SIZE, 70])
@pytest.mark.parametrize(
    ("scheduler_class", "max_decode_steps"), [(Scheduler, 1), (Scheduler, 8), (AsyncScheduler, 8)]
)
def test_turns_of_a_chat_compute_little_more_than_their_new_tokens(
    num_answered, scheduler_class, max_decode_steps
):
    scheduler, runner = make(scheduler_class), FunctionRunner()
    prompt = list(range(1, 71))
    for turn in range(5):
        request = add(scheduler, f"turn{turn}", prompt, max_tokens=num_answered)
        run_until_end(scheduler, runner, max_decode_steps=max_decode_steps)
        # The last token of an answer is never computed in its own turn.
        num_new = 21 if turn > 0 else len(prompt)
        assert len(prompt) - request.num_cached_tokens <= BLOCK_SIZE + num_new
        answer = continuation(prompt, num_answered)
        assert request.all_token_ids[len(prompt) :] == answer
        prompt = prompt + answer + [500 * (turn + 1) + k for k in range(20)]


def test_saved_states_take_no_more_blocks_than_their_share():
    scheduler = make(state_cache_share=5 * STATES.num_slot_blocks / NUM_BLOCKS)
    runner = FunctionRunner()
    (states,) = scheduler.kv_cache_manager.coordinator.state_managers
    for i in range(20):
        add(scheduler, f"r{i}", 70, max_tokens=40)
        run_until_end(scheduler, runner)
        assert len(states.saved_states.find_all()) <= 5
    scheduler.check_invariants()


def test_without_a_share_no_state_is_saved_and_no_prompt_is_cut():
    scheduler, runner = make(state_cache_share=0), FunctionRunner()
    for name in "ab":
        request = add(scheduler, name, range(70), max_tokens=2)
        output = step(scheduler, runner)
        assert output.num_scheduled_tokens == {name: 70}
        run_until_end(scheduler, runner)
        assert request.num_cached_tokens == 0
