"""A prefix that a proxy takes off is no part of a path, and only as a whole."""

import pytest

from paxkv.server.routes.route_path import is_below, route_path


@pytest.mark.parametrize(
    ("root_path", "path", "inside"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/api", "/api/v1/models", "/v1/models"),
        ("/api", "/v1/models", "/v1/models"),
        ("/api", "/apiv1", "/apiv1"),
        ("/api", "/api", "/api"),
        ("/api", "/api/api/v1", "/api/v1"),
    ],
)
def test_root_path_is_taken_off_once(root_path, path, inside):
    assert route_path({"path": path, "root_path": root_path}) == inside


def test_a_path_includes_itself_and_what_follows_a_slash():
    assert is_below("/v1/a", "/v1/a") and is_below("/v1/a/b", "/v1/a")
    assert not is_below("/v1/ab", "/v1/a") and not is_below("/v1", "/v1/a")
