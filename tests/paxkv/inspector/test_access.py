"""The inspector is open on this machine, and for others only if the operator allows it."""

import pytest
from starlette.requests import Request

from paxkv.config.server_config import ServerConfig
from paxkv.errors import ConfigError
from paxkv.inspector.access import InspectorOffError, check_access, is_loopback


def ask(config, host="localhost:8000", method="GET", server=None, **headers):
    raw = [(b"host", host.encode("latin-1"))]
    raw += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "headers": raw, "path": "/inspector"}
    scope["server"] = server
    check_access(Request(scope), config)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_loopback_is_open(host):
    ask(ServerConfig(host=host))
    ask(ServerConfig(host=host), host="127.0.0.1:8000", sec_fetch_site="same-origin")
    ask(ServerConfig(host=host), host="[::1]:8000")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_inspector_is_off_on_a_public_address_by_default(host):
    with pytest.raises(InspectorOffError, match="--enable-inspector"):
        ask(ServerConfig(host=host))
    ask(ServerConfig(host=host, enable_inspector=True), host="example.org")


def test_inspector_can_be_disabled():
    with pytest.raises(InspectorOffError, match="--no-enable-inspector"):
        ask(ServerConfig(enable_inspector=False))


def test_other_host_names_are_rejected():
    with pytest.raises(InspectorOffError, match="attacker"):
        ask(ServerConfig(), host="attacker.example:8000")


@pytest.mark.parametrize("host", ["attacker.example\x80", "attacker.example:99999999", ""])
def test_malformed_host_header_is_rejected(host):
    with pytest.raises(InspectorOffError, match="this machine alone"):
        ask(ServerConfig(), host=host, server=("127.0.0.1", 8000))


def test_other_sites_may_only_link_to_the_inspector():
    ask(ServerConfig(), sec_fetch_site="cross-site", sec_fetch_mode="navigate")
    for method, mode in (("GET", "cors"), ("POST", "navigate"), ("POST", "no-cors")):
        with pytest.raises(InspectorOffError, match="other sites"):
            ask(ServerConfig(), method=method, sec_fetch_site="cross-site", sec_fetch_mode=mode)


def test_names_that_resemble_loopback_are_not_loopback():
    assert is_loopback("[::1]") and is_loopback("app.localhost")
    assert not is_loopback("localhost.example.org") and not is_loopback("")


def test_settings_are_checked():
    for bad in ({"enable_inspector": 1}, {"inspector_show_text": 1}):
        with pytest.raises(ConfigError, match="must be true or false"):
            ServerConfig(**bad)
    with pytest.raises(ConfigError, match="inspector_max_trace_bytes"):
        ServerConfig(inspector_max_trace_bytes=0)
