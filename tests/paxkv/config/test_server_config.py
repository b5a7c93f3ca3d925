"""Settings of the server that cannot work are rejected, and keys are not shown."""

import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.errors import ConfigError


def test_repr_and_errors_do_not_show_keys():
    assert "geheim" not in repr(ServerConfig(api_key=("geheim",)))
    for keys in (("geheim", ""), "geheim", ("geheim", 5)):
        with pytest.raises(ConfigError, match="api_key must be a list of strings") as raised:
            ServerConfig(api_key=keys)
        assert "geheim" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_waiting_requests": -1}, "max_waiting_requests must be an integer of at least 0"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs must be an integer of at least 1"),
        ({"h11_max_header_count": 0}, "h11_max_header_count must be an integer of at least 1"),
        ({"stream_interval": 0}, "stream_interval must be an integer of at least 1, got 0"),
        ({"root_path": "/tokenizer_info"}, "a path of the server"),
        ({"max_header_bytes": 10}, "at least 256, got 10"),
        ({"max_connections": 0}, "at least 1, got 0"),
        ({"max_unread_bytes": 0}, "max_unread_bytes must be an integer of at least 1, got 0"),
        ({"root_path": "api"}, "begin with a slash.*'api'"),
        ({"root_path": "/api/"}, "not end in one"),
        ({"root_path": "/v1"}, "a path of the server, got '/v1', which is /v1 or below it"),
        ({"root_path": "/v1/chat"}, "a path of the server, got '/v1/chat', which is /v1 or below"),
        ({"root_path": "/inspector"}, "a path of the server, got '/inspector', which is"),
        ({"root_path": "/health"}, "a path of the server, got '/health'; let the proxy"),
        ({"ssl_keyfile": "k.pem"}, "ssl_keyfile is set, but HTTPS needs ssl_certfile"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs is set, but"),
        ({"ssl_certfile": "c.pem", "ssl_cert_reqs": 3}, "0, 1 or 2, got 3"),
        ({"ssl_certfile": "c.pem", "ssl_cert_reqs": 2}, "needs ssl_ca_certs"),
        ({"allowed_origins": "*"}, "allowed_origins must be a list"),
        ({"disable_access_log_for_endpoints": "/a,b"}, "got 'b'"),
        ({"profile_dir": "p"}, "enable_admin"),
        ({"port": 70000}, "65535"),
        ({"port": "http"}, "65535"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s"),
        ({"shutdown_timeout_s": float("inf")}, "shutdown_timeout_s"),
        ({"log_stats_interval_s": 0}, "log_stats_interval_s must be a positive number .* got 0"),
        ({"disable_log_stats": "no"}, "disable_log_stats must be true or false, got 'no'"),
        ({"enable_admin": 1}, "true or false"),
        ({"engine_ready_timeout_s": -1}, "0 for none, got -1"),
        # Every start would count as hanging.
        ({"engine_ready_timeout_s": 1}, "at least 30 seconds, or 0 for none, got 1"),
        ({"execute_model_timeout_s": -1}, "0 for none, got -1"),
        ({"max_step_seconds": True}, "max_step_seconds must be a number of seconds, or 0"),
        ({"execute_model_timeout_s": float("nan")}, "0 for none, got nan"),
    ],
)
def test_the_error_names_the_invalid_setting(settings, words):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**settings)


def test_paths_without_access_log_are_separated_by_commas():
    config = ServerConfig(disable_access_log_for_endpoints="/health, /metrics,")
    assert config.paths_without_access_log == {"/health", "/metrics"}
