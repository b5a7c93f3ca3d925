"""The HTTP application: routes, limits and error handlers around one engine."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from paxkv.config import ServerConfig
from paxkv.errors import PaxkvError
from paxkv.inspector.routes import InspectorRoutes
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.error_response import (
    handle_bug,
    handle_disconnect,
    handle_http_error,
    handle_paxkv_error,
)
from paxkv.server.generation import Generator
from paxkv.server.metrics import ServerMetrics
from paxkv.server.middleware import DisconnectMiddleware, RequestIdMiddleware
from paxkv.server.routes_chat import ChatRoutes
from paxkv.server.routes_completions import CompletionRoutes
from paxkv.server.routes_info import InfoRoutes


def create_app(engine: EngineClient, config: ServerConfig) -> Starlette:
    """An ASGI application that serves `engine`, which must have started.

    The application neither starts nor ends the engine: whoever built it does. It limits how long a
    body may be; `http_server.py` limits how long one may take.
    """
    metrics = ServerMetrics(engine.model_info.served_model_name)
    generator = Generator(engine, metrics)
    inspector = InspectorRoutes(engine, config)
    limit = config.max_body_bytes
    app = Starlette(
        routes=[
            *CompletionRoutes(engine, generator, max_body_bytes=limit).routes(),
            *ChatRoutes(engine, generator, max_body_bytes=limit).routes(),
            *InfoRoutes(engine, metrics, max_body_bytes=limit).routes(),
            *inspector.routes(),
        ],
        middleware=[Middleware(RequestIdMiddleware), Middleware(DisconnectMiddleware)],
        exception_handlers={
            PaxkvError: handle_paxkv_error,
            HTTPException: handle_http_error,
            ClientDisconnect: handle_disconnect,
            Exception: handle_bug,
        },
    )
    # A path with a slash too many is an unknown path, not a redirect that loses the body.
    app.router.redirect_slashes = False
    # Streams without an end of their own: a server that drains ends them first.
    app.state.close_streams = inspector.close
    return app
