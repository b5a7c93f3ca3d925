"""The HTTP application: routes, limits and error handlers around one engine."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from paxkv.config.engine_config import EngineConfig
from paxkv.config.server_config import ServerConfig
from paxkv.errors import PaxkvError
from paxkv.inspector.routes import INSPECTED_PATHS, InspectorRoutes
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.generation import Generator
from paxkv.server.metrics.http_metrics import HttpMetricsMiddleware
from paxkv.server.metrics.server_metrics import ServerMetrics
from paxkv.server.middleware.access_log import AccessLogMiddleware
from paxkv.server.middleware.admission import Admission
from paxkv.server.middleware.anthropic_middleware import AnthropicMiddleware
from paxkv.server.middleware.api_keys import ApiKeyMiddleware
from paxkv.server.middleware.disputed_length import DisputedLengthMiddleware
from paxkv.server.middleware.ignored_parts_middleware import (
    IGNORED_HEADER,
    IgnoredPartsMiddleware,
)
from paxkv.server.middleware.plain_path import PlainPathMiddleware
from paxkv.server.middleware.request_middleware import (
    DisconnectMiddleware,
    HeaderLimitMiddleware,
    RequestIdMiddleware,
    RootPathMiddleware,
)
from paxkv.server.protocol.error_response import (
    handle_bug,
    handle_disconnect,
    handle_http_error,
    handle_paxkv_error,
)
from paxkv.server.routes.admin import ADMIN_PATHS, AdminRoutes
from paxkv.server.routes.chat import ChatRoutes
from paxkv.server.routes.completions import CompletionRoutes
from paxkv.server.routes.front_page import FrontPageRoutes
from paxkv.server.routes.info import InfoRoutes
from paxkv.server.routes.messages import MESSAGES_PATH, MessagesRoutes
from paxkv.server.routes.openapi import OpenApiRoutes
from paxkv.server.routes.responses import ResponsesRoutes
from paxkv.server.routes.server_info import SERVER_INFO_PATH, ServerInfoRoutes
from paxkv.server.routes.tokenizer import TokenizerRoutes
from paxkv.server.routes.tokenizer_info import TokenizerInfoRoutes


def create_app(
    engine: EngineClient, config: ServerConfig, engine_config: EngineConfig | None = None
) -> Starlette:
    """Builds an ASGI application that serves `engine`, which must have started.

    The caller starts and closes the engine. The application limits the size of a body;
    `http_server.py` limits the time in which a request must arrive.

    Args:
        engine_config: The engine's settings, shown by `GET /server_info`. If None, the route shows
            only what the engine reported when it started.
    """
    info = engine.model_info
    metrics = ServerMetrics(
        info.served_model_name,
        max_model_len=info.max_model_len,
        cache_settings=info.cache_settings,
    )
    admission = Admission(engine, config.max_waiting_requests, config.max_num_queued_reqs)
    generator = Generator(engine, metrics, admission)
    admin_routes = []
    if config.enable_admin:
        admin_routes = AdminRoutes(engine, generator.names, profile_dir=config.profile_dir).routes()
        admin_routes += ServerInfoRoutes(info, engine_config).routes()
    inspector = InspectorRoutes(engine, config)
    responses = ResponsesRoutes(engine, generator, config)
    app = Starlette(
        routes=[
            *CompletionRoutes(engine, generator, config).routes(),
            *ChatRoutes(engine, generator, config).routes(),
            *responses.routes(),
            *MessagesRoutes(engine, generator, config).routes(),
            *([] if config.disable_fastapi_docs else OpenApiRoutes().routes()),
            *TokenizerRoutes(engine, config).routes(),
            *(
                TokenizerInfoRoutes(engine).routes()
                if config.enable_tokenizer_info_endpoint
                else []
            ),
            *FrontPageRoutes(config).routes(),
            *InfoRoutes(engine, metrics, admission).routes(),
            *admin_routes,
            *inspector.routes(),
        ],
        middleware=_middleware(config, metrics),
        exception_handlers={
            PaxkvError: handle_paxkv_error,
            HTTPException: handle_http_error,
            ClientDisconnect: handle_disconnect,
            Exception: handle_bug,
        },
    )
    # When the server drains, it first ends the inspector's streams, which would never end, and
    # background responses, which no client waits for.
    app.state.on_drain = (inspector.close, responses.close)
    return app


def _middleware(config: ServerConfig, metrics: ServerMetrics) -> list[Middleware]:
    """The middleware layers, outermost first."""
    layers = [
        Middleware(DisputedLengthMiddleware),
        Middleware(RootPathMiddleware, root_path=config.root_path or ""),
        Middleware(PlainPathMiddleware),
        Middleware(RequestIdMiddleware),
        Middleware(IgnoredPartsMiddleware),
        Middleware(HttpMetricsMiddleware, metrics=metrics.http),
    ]
    if not config.disable_uvicorn_access_log:
        layers.append(
            Middleware(AccessLogMiddleware, without_paths=config.paths_without_access_log)
        )
    layers.append(Middleware(AnthropicMiddleware, path=MESSAGES_PATH))
    layers.append(
        Middleware(
            HeaderLimitMiddleware,
            max_header_bytes=config.max_header_bytes,
            max_header_count=config.h11_max_header_count,
        )
    )
    if config.allowed_origins:
        # Outside the key check: a browser's preflight request has no key, and scripts can read a
        # 401 only if it has CORS headers.
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
                expose_headers=("X-Request-Id", "Retry-After", IGNORED_HEADER),
            )
        )
    if config.api_key:
        layers.append(
            Middleware(
                ApiKeyMiddleware,
                api_keys=config.api_key,
                other_paths=(*ADMIN_PATHS, SERVER_INFO_PATH, *INSPECTED_PATHS),
                x_api_key_paths=(MESSAGES_PATH,),
            )
        )
    layers.append(Middleware(DisconnectMiddleware))
    return layers
