"""Slashes that are too many do not change where a request goes."""

import pytest

from paxkv.server.middleware.plain_path import plain_path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "/"),
        ("", "/"),
        ("//", "/"),
        ("/v1/messages", "/v1/messages"),
        ("/v1/messages/", "/v1/messages"),
        ("//v1//messages///", "/v1/messages"),
        ("/v1/models/", "/v1/models"),
        # A model that was named after its folder.
        ("/v1/models//of/models/", "/v1/models//of/models/"),
        ("/other/v1/models/a//b/", "/other/v1/models/a/b"),
    ],
)
def test_slashes_too_many_are_removed(path, expected):
    assert plain_path(path) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/api", "/api/"),
        ("/api/", "/api/"),
        ("//api//", "/api/"),
        ("/api/v1/messages/", "/api/v1/messages"),
        ("/api/v1/models//a/", "/api/v1/models//a/"),
        ("/apiv1/", "/apiv1"),
    ],
)
def test_the_path_of_a_proxy_is_kept(path, expected):
    assert plain_path(path, "/api") == expected
