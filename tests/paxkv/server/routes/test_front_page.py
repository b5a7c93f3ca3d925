"""The page at / links to what its reader may open."""

import re

import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.server.routes.front_page import FrontPageRoutes


def _links(page):
    return re.findall(r'href="([^"]*)"', page)


def test_every_promised_route_exists():
    (route,) = FrontPageRoutes(ServerConfig()).routes()
    assert (route.path, route.methods) == ("/", {"GET", "HEAD"})


def test_every_link_leads_somewhere(shared_server):
    response = shared_server.client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    links = _links(response.text)
    assert links == ["/openapi.json", "/v1/models", "/metrics", "/health", "/inspector"]
    assert {shared_server.client.get(link).status_code for link in links} == {200}


def test_head_has_no_body(shared_server):
    response = shared_server.client.head("/")
    assert (response.status_code, response.content) == (200, b"")
    assert shared_server.client.post("/").status_code == 405


@pytest.mark.parametrize("path", ["/", "/api", "/api/"])
def test_it_needs_no_key_and_hides_routes_that_are_off(start_server, path):
    server = start_server(
        root_path="/api", api_key=("key",), enable_inspector=False, disable_fastapi_docs=True
    )
    response = server.client.get(path)
    assert response.status_code == 200
    assert _links(response.text) == ["/api/v1/models", "/api/metrics", "/api/health"]
