"""The operator's name of a request leads to the engine's ids, for the latest requests."""

from paxkv.server.protocol.request_names import MAX_NAMES, RequestNames, client_request_id


def test_a_name_keeps_the_ids_of_its_prompts_and_the_oldest_name_is_dropped():
    names = RequestNames()
    client_request_id.set("mine")
    names.record("e1")
    names.record("e2")
    assert names.engine_ids("mine") == ["e1", "e2"]
    for i in range(MAX_NAMES):
        client_request_id.set(f"other-{i}")
        names.record("e")
    assert names.engine_ids("mine") == []
    assert names.engine_ids(f"other-{MAX_NAMES - 1}") == ["e"]


def test_a_name_used_again_and_again_needs_bounded_memory():
    names = RequestNames()
    client_request_id.set("same")
    for i in range(3 * MAX_NAMES):
        names.record(f"e{i}")
    assert names.engine_ids("same") == [f"e{i}" for i in range(2 * MAX_NAMES, 3 * MAX_NAMES)]
