"""As many connections as the limit of open files allows, and a clear word where it does not."""

import resource

import pytest

from paxkv.errors import ConfigError
from paxkv.server import open_files
from paxkv.server.open_files import MOST_CONNECTIONS, NUM_OTHER_FILES, allow_connections


@pytest.fixture
def limits(monkeypatch):
    """Limits that a test sets, instead of this process' own; what was set is its first item."""
    values = [(1024, 4096)]

    def set_limits(_resource, new):
        values[0] = new

    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: values[0])
    monkeypatch.setattr(open_files.resource, "setrlimit", set_limits)
    return values


def test_soft_limit_is_raised_to_what_is_needed(limits):
    limits[0] = (1024, 1_000_000)
    assert allow_connections(10_000) == 10_000
    assert limits[0] == (10_000 + NUM_OTHER_FILES, 1_000_000)


def test_without_a_limit_there_are_as_many_connections_as_possible(limits, caplog):
    limits[0] = (1024, 1_000_000)
    assert allow_connections(None) == MOST_CONNECTIONS
    limits[0] = (1024, resource.RLIM_INFINITY)
    assert allow_connections(None) == MOST_CONNECTIONS
    limits[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert allow_connections(None) == MOST_CONNECTIONS
    assert allow_connections(5) == 5
    assert not caplog.records


def test_high_limit_is_left_alone(limits):
    limits[0] = (200_000, 200_000)
    assert allow_connections(100) == 100
    assert limits[0] == (200_000, 200_000)


def test_a_low_hard_limit_is_a_warning_or_an_error_that_says_what_to_do(limits, caplog):
    assert allow_connections(None) == 4096 - NUM_OTHER_FILES
    assert "hard limit of open files is 4096" in caplog.text
    limits[0] = (1024, 4096)
    with pytest.raises(ConfigError, match=r"4096 open files.*; 4000 connections.*ulimit -Hn"):
        allow_connections(4000)
    with pytest.raises(ConfigError, match=r"at least 4512 .*, or set --max-connections to 3584\.$"):
        allow_connections(4000)


@pytest.mark.parametrize(("max_connections", "num_files"), [(None, 513), (1, 513), (1000, 1512)])
def test_limit_below_one_connection_asks_for_no_smaller_number(limits, max_connections, num_files):
    limits[0] = (80, 80)
    with pytest.raises(ConfigError, match="80 open files") as raised:
        allow_connections(max_connections)
    assert f"to at least {num_files} (ulimit -Hn" in str(raised.value)
    assert "--max-connections" not in str(raised.value)
