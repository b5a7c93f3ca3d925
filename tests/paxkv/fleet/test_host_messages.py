"""Host 0 compares the settings of a host with its own, and finds settings that only one has."""

import socket

import msgspec
import pytest

from paxkv.config.engine_config import EngineConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.errors import EngineDeadError
from paxkv.fleet import host_messages
from paxkv.fleet.host_messages import HostLink, hello_of, why_refused

CONFIG = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2, nnodes=2))
HELLO = hello_of(
    EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2, nnodes=2, node_rank=1))
)


def changed(section: str, **settings: object) -> dict[str, dict[str, object]]:
    return HELLO.config | {section: HELLO.config.get(section, {}) | settings}


def without(section: str) -> dict[str, dict[str, object]]:
    return {name: part for name, part in HELLO.config.items() if name != section}


def test_a_host_with_the_same_settings_is_accepted() -> None:
    received = msgspec.json.decode(msgspec.json.encode(HELLO), type=type(HELLO))
    assert why_refused(received, CONFIG) is None


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        (changed("model", seed=7), "seed=7 (host 0: 0)"),
        # Another checkout may have the same version.
        (changed("runner", new=1), "new=1 (host 0: None)"),
        (changed("lora", rank=8), "rank=8 (host 0: None)"),
        (without("runner"), "kernels=None (host 0: 'auto')"),
    ],
)
def test_a_host_with_other_settings_is_refused(
    config: dict[str, dict[str, object]], difference: str
) -> None:
    assert difference in why_refused(msgspec.structs.replace(HELLO, config=config), CONFIG)


def test_settings_in_another_form_are_an_unknown_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        link = HostLink(server.accept()[0])
    with theirs:
        theirs.sendall(b'{"type":"Hello","rank":1,"version":"0","config":"[]"}\n')
        with pytest.raises(EngineDeadError, match="unknown message .* Install the same paxkv"):
            link.receive()
        link.release()


@pytest.mark.time_limit(20)
def test_a_silent_host_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_messages, "LOST_AFTER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname(), timeout=20)
        link = HostLink(server.accept()[0])
    with theirs:
        with pytest.raises(EngineDeadError, match="sent nothing for 0.05 seconds"):
            link.receive()
        link.release()
