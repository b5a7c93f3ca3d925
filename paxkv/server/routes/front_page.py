"""GET /: a page of links, for people and clients that open the server's address."""

import html

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import paxkv
from paxkv.config.server_config import ServerConfig
from paxkv.inspector.access import InspectorOffError, check_access

_HEADERS = {"Content-Security-Policy": "default-src 'none'", "X-Content-Type-Options": "nosniff"}


class FrontPageRoutes:
    """The route of the page, which needs no API key and shows nothing about the model."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config

    def routes(self) -> list[Route]:
        return [Route("/", self.page)]

    async def page(self, request: Request) -> Response:
        """Links to the routes that this client may open. Clients may also send HEAD."""
        links = {"/v1/models": "models", "/metrics": "metrics", "/health": "health"}
        if not self._config.disable_fastapi_docs:
            links = {"/openapi.json": "docs: the API as an OpenAPI document"} | links
        if self._may_inspect(request):
            links["/inspector"] = "inspector"
        root_path = html.escape(self._config.root_path or "")
        items = "".join(
            f'<li><a href="{root_path}{path}">{text}</a></li>\n' for path, text in links.items()
        )
        page = (
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>paxkv</title>\n'
            f"<h1>paxkv {paxkv.__version__}</h1>\n<p>This server speaks OpenAI's and Anthropic's "
            f"APIs.</p>\n<ul>\n{items}</ul>\n</html>\n"
        )
        return Response(page, media_type="text/html", headers=_HEADERS)

    def _may_inspect(self, request: Request) -> bool:
        try:
            check_access(request, self._config)
        except InspectorOffError:
            return False
        return True
