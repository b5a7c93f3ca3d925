"""The synchronous client over a real engine core with a fake executor."""

from collections.abc import Iterator

import pytest

from paxkv.client.inproc_client import InprocClient
from paxkv.client.output_processor import OutputProcessor
from paxkv.contracts.request_output import RequestOutput
from paxkv.engine.core_thread import CoreThread
from paxkv.errors import EngineDeadError, InvariantError, PaxkvError
from tests.paxkv.engine.fake_engine import make_engine_core, make_request
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer


@pytest.fixture
def client() -> Iterator[InprocClient]:
    client = make_client()
    yield client
    client.close()


def make_client(**arguments: object) -> InprocClient:
    return InprocClient(
        CoreThread(make_engine_core(**arguments)), OutputProcessor(byte_level_tokenizer())
    )


def run(client: InprocClient) -> dict[str, RequestOutput]:
    finished = {}
    while client.num_unfinished_requests:
        finished.update({output.request_id: output for output in client.wait_for_outputs()})
    return finished


def test_many_requests_return_complete_outputs(client: InprocClient) -> None:
    for number in range(100):
        prompt = list(f"<{number}>".encode())
        client.add_request(make_request(str(number), prompt, max_tokens=len(prompt)), prompt="p")
    finished = run(client)
    assert {i: o.outputs[0].text for i, o in finished.items()} == {
        str(number): f"<{number}>" for number in range(100)
    }


def test_stop_string_frees_the_request_in_the_engine(client: InprocClient) -> None:
    client.add_request(make_request("a", list(b"one. two. "), max_tokens=240, stop=". "))
    assert run(client)["a"].outputs[0].text == "one"
    while '"num_running_reqs":0' not in client.call("get_stats"):
        pass
    assert client.call("check_invariants") == "null"


def test_outputs_that_arrive_during_a_call_are_kept(client: InprocClient) -> None:
    client.add_request(make_request("a", [97], max_tokens=1))
    while client.num_unfinished_requests:
        client.call("get_stats")
    assert [output.request_id for output in client.wait_for_outputs()] == ["a"]


def test_abort_ends_requests_in_client_and_engine(client: InprocClient) -> None:
    client.add_request(make_request("a", [97], max_tokens=250))
    (output,) = client.abort(["a", "unknown"])
    assert output.outputs[0].finish_reason == "abort"
    client.add_request(make_request("b", [98], max_tokens=1))
    assert list(run(client)) == ["b"]


def test_abort_drops_outputs_that_were_not_returned(client: InprocClient) -> None:
    client.add_request(make_request("a", [97], max_tokens=1))
    while client.num_unfinished_requests:
        client.call("get_stats")
    assert client.abort(["a"]) == []
    client.add_request(make_request("b", [98], max_tokens=1))
    assert list(run(client)) == ["b"]


def test_abort_reaches_the_engine_after_a_stop_string(client: InprocClient) -> None:
    client.add_request(make_request("a", [97], max_tokens=250))
    client._output_processor.abort(["a"])
    client.abort(["a"])
    stats = client.call("get_stats")
    assert '"num_running_reqs":0' in stats
    assert '"num_waiting_reqs":0' in stats


def test_several_completions_are_one_output_and_release_their_blocks(client: InprocClient) -> None:
    request = make_request("a", list(b"0123456789"), max_tokens=20, n=5)
    client.add_request(request, prompt="p")
    (output,) = run(client).values()
    assert [(c.index, c.text) for c in output.outputs] == [
        (i, "01234567890123456789"[:20]) for i in range(5)
    ]
    until_idle(client)


def test_abort_of_several_completions_ends_all_of_them(client: InprocClient) -> None:
    client.add_request(make_request("a", list(b"0123456789"), max_tokens=240, n=5))
    (output,) = client.abort(["a"])
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 5
    until_idle(client)


def test_abort_reaches_the_children_after_a_stop_string(client: InprocClient) -> None:
    client.add_request(make_request("a", list(b"0123456789"), max_tokens=240, n=5))
    client._output_processor.abort(["a"])
    client.abort(["a"])
    until_idle(client)


def until_idle(client: InprocClient) -> None:
    """Waits until there is no request and no held block, including blocks kept for forks."""
    while '"num_free_blocks":64' not in client.call("get_stats"):
        pass
    stats = client.call("get_stats")
    assert '"num_running_reqs":0' in stats
    assert '"num_waiting_reqs":0' in stats
    assert client.call("check_invariants") == "null"


def test_failed_call_raises_the_error_of_the_engine(client: InprocClient) -> None:
    with pytest.raises(PaxkvError, match="unknown method"):
        client.call("fly")


def test_failed_detokenization_is_raised_and_ends_its_request(
    client: InprocClient,
) -> None:
    def fail(output: object, now_s: float) -> None:
        raise RuntimeError("no such token")

    client.add_request(make_request("a", [97], max_tokens=240))
    client._output_processor._completions["a"].process = fail
    with pytest.raises(InvariantError, match="no such token"):
        run(client)
    until_idle(client)


def test_dead_engine_ends_every_wait() -> None:
    client = make_client(fails_at_step=1)
    client.add_request(make_request("a", [97]))
    with pytest.raises(EngineDeadError, match="on fire"):
        run(client)
    with pytest.raises(EngineDeadError):
        client.wait_for_outputs()
    with pytest.raises(EngineDeadError):
        client.call("get_stats")
