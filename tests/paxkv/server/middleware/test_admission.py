"""Simultaneous requests do not exceed the bound on waiting requests; errors come first."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import pytest

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.errors import InvalidRequestError
from paxkv.server.generation import Generator
from paxkv.server.metrics.server_metrics import ServerMetrics
from paxkv.server.middleware.admission import Admission, num_engine_requests
from tests.paxkv.server.conftest import HELD_S, PATIENCE_S, wait_until
from tests.paxkv.server.fake_engine import MODEL_NAME, NO_TOKENS, FakeEngine

COMPLETIONS = "/v1/completions"


def _admission(max_waiting_requests, *, max_num_seqs=4, max_num_queued_reqs=None, **stats):
    engine = SimpleNamespace(
        model_info=SimpleNamespace(max_num_seqs=max_num_seqs), latest_stats=SchedulerStats(**stats)
    )
    return Admission(engine, max_waiting_requests, max_num_queued_reqs)


def test_without_a_bound_every_request_is_admitted():
    assert _admission(None).has_room(10_000)


def test_the_places_are_those_of_the_batch_and_of_waiting_requests():
    admission = _admission(2)
    with admission.admit(3), admission.admit(3):
        assert admission.num_requests == 6
        assert admission.num_calls == 2
        assert not admission.has_room(1)
    assert admission.num_requests == admission.num_calls == 0
    assert admission.has_room(6)


def test_running_and_waiting_requests_share_a_bound():
    # The batch has room for 4, and 2 may wait.
    for max_waiting in (None, 2):
        admission = _admission(max_waiting, max_num_queued_reqs=3)
        with admission.admit(2):
            assert admission.has_room(1)
            assert not admission.has_room(2)
            with pytest.raises(InvalidRequestError, match="at most 3 at once"):
                admission.has_room(4)
            assert "2 requests run or wait, 3 may run or wait" in str(admission.refusal())
    admission = _admission(2, max_num_queued_reqs=100)
    with admission.admit(6):
        assert not admission.has_room(1)


def test_a_failed_request_frees_its_place():
    admission = _admission(0)
    with pytest.raises(RuntimeError), admission.admit(4):
        raise RuntimeError
    assert admission.has_room(4)


def test_an_engine_with_waiting_requests_offers_only_running_places():
    # 2 run and 1 waits though 4 could run: memory is short. 3 + 1 - 2 = 2 would wait.
    full = {"num_running_reqs": 2, "num_waiting_reqs": 1}
    for max_waiting, has_room in ((1, False), (2, True)):
        admission = _admission(max_waiting, **full)
        with admission.admit(3):
            assert admission.has_room(1) == has_room


def test_a_request_that_waits_for_a_grammar_blocks_only_its_own_place():
    # One of 4 places is in use, and one waiting request has a grammar to compile: not full.
    for num_compiling, num_waiting, has_room in ((1, 1, True), (1, 2, False)):
        admission = _admission(
            0, num_running_reqs=1, num_waiting_reqs=num_waiting, num_compiling_reqs=num_compiling
        )
        with admission.admit(2):
            assert admission.has_room(2) == has_room
            assert not admission.has_room(3)


def test_load_that_the_engine_reports_after_clients_left_does_not_block_requests():
    assert _admission(0, num_running_reqs=0, num_waiting_reqs=5).has_room(4)


def test_a_call_too_large_for_an_empty_server_is_a_client_error():
    with pytest.raises(InvalidRequestError, match="7 completions of all its prompts.* 6 at once"):
        _admission(2).has_room(7)


def test_each_completion_and_each_beam_needs_a_place():
    assert num_engine_requests(2, SamplingParams(n=3, temperature=1.0)) == 6
    assert num_engine_requests(2, BeamSearchParams(beam_width=4, max_tokens=2)) == 8


def test_burst_on_one_loop_admits_exactly_as_many_as_fit():
    async def run():
        engine = FakeEngine(seconds_per_token=0.001)  # max_num_seqs is 8
        generator = Generator(engine, ServerMetrics("m"), Admission(engine, 3))

        async def call(i):
            params = SamplingParams(max_tokens=3)
            prompt = {"prompt_token_ids": [i + 1]}
            outputs = generator.generate([prompt], params, priority=0, stream=False)
            return [output async for output in outputs]

        results = await asyncio.gather(*(call(i) for i in range(40)), return_exceptions=True)
        assert engine.most_running == 11
        return [r for r in results if isinstance(r, Exception)]

    errors = asyncio.run(run())
    assert len(errors) == 29
    assert all("the server is full: 11 requests" in str(error) for error in errors)


@pytest.fixture
def full_server(start_server):
    """A server in which 8 requests run and 1 waits, until the test has ended."""
    server = start_server(seconds_per_token=HELD_S, max_waiting_requests=1)
    with ThreadPoolExecutor(9) as pool:
        body = {"prompt": "a", "max_tokens": 40}
        calls = [pool.submit(server.client.post, COMPLETIONS, json=body) for _ in range(9)]
        wait_until(lambda: len(server.engine.running) == 9)
        yield server
        server.answer_once_running(len(server.engine.running))
        assert [call.result().status_code for call in calls] == [200] * 9
    assert server.client.post(COMPLETIONS, json={"prompt": "a"} | {"max_tokens": 1}).is_success


def test_a_request_over_the_limit_is_503_at_once_and_the_others_finish(full_server):
    for stream in (False, True):
        response = full_server.client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "overloaded")
        assert "at most 1 may wait" in error["message"]
    # A request that can never fit is the caller's mistake, also now.
    for prompt in ("a" * 600, [300], ["a"] * 10):
        response = full_server.client.post(COMPLETIONS, json={"prompt": prompt})
        assert response.status_code == 400
    assert full_server.client.get("/load").json() == {"server_load": 9}
    assert full_server.client.get("/health").status_code == 200


def test_openais_client_retries_after_the_given_time(full_server):
    statuses, freed_s = [], []

    def make_room(response):
        statuses.append(response.status_code)
        if len(statuses) == 1:
            full_server.answer_once_running(9)
            wait_until(lambda: full_server.client.get("/load").json() == {"server_load": 0})
            freed_s.append(time.monotonic())

    http_client = httpx.Client(event_hooks={"response": [make_room]})
    with openai.OpenAI(
        base_url=f"{full_server.url}/v1",
        api_key="none",
        max_retries=8,
        timeout=PATIENCE_S,
        http_client=http_client,
    ) as client:
        completion = client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=1)
    assert completion.choices[0].text and statuses == [503, 200]
    assert time.monotonic() - freed_s[0] >= 0.9


def test_a_client_that_disconnects_frees_its_place(start_server):
    server = start_server(max_waiting_requests=0)
    for _ in range(3):
        with server.client.stream(
            "POST", COMPLETIONS, json={"prompt": ["a"] * 7 + [NO_TOKENS], "stream": True}
        ):
            pass
    wait_until(lambda: server.client.get("/load").json() == {"server_load": 0})
