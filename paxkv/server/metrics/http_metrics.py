"""Prometheus metrics of HTTP requests, under the same names as in vLLM."""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paxkv.server.protocol.error_response import CLIENT_CLOSED_REQUEST

# Not counted, as in vLLM, because monitors request these paths every few seconds.
_UNCOUNTED_PATHS = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
# A client may send any word as its method. As a label, each word would create another series.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_HANDLER, _OTHER_METHOD = "none", "other"
_DURATION_BUCKETS_S = (0.1, 0.5, 1.0)
_FINE_DURATION_BUCKETS_S = (
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)
    + (5.0, 7.5, 10.0, 30.0, 60.0)
)  # fmt: skip


class HttpMetrics:
    """Counts requests by route, method and class of status.

    Source: the names, labels and buckets of `prometheus-fastapi-instrumentator`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests_total",
            "HTTP requests",
            ("method", "status", "handler"),
            registry=registry,
        )
        self._request_bytes, self._response_bytes = (
            Summary(f"http_{kind}_size_bytes", f"bytes of {kind}s' bodies", ("handler",),
                    registry=registry)
            for kind in ("request", "response")
        )  # fmt: skip
        self._fine_duration = Histogram(
            "http_request_duration_highr_seconds",
            "from a request to the end of its response",
            buckets=_FINE_DURATION_BUCKETS_S,
            registry=registry,
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "from a request to the end of its response, by handler",
            ("method", "handler"),
            buckets=_DURATION_BUCKETS_S,
            registry=registry,
        )

    def observe(
        self,
        *,
        handler: str,
        method: str,
        status: int,
        duration_s: float,
        num_request_bytes: int,
        num_response_bytes: int,
    ) -> None:
        """Counts one request that was answered.

        Args:
            handler: The route's path with placeholders, never the path that was sent.
        """
        method = method if method in _METHODS else _OTHER_METHOD
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._request_bytes.labels(handler).observe(num_request_bytes)
        self._response_bytes.labels(handler).observe(num_response_bytes)
        self._duration.labels(method, handler).observe(duration_s)
        self._fine_duration.observe(duration_s)


class HttpMetricsMiddleware:
    """Reports each request to `HttpMetrics` when its answer has ended."""

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = _handler(scope["app"].routes, scope) if scope["type"] == "http" else None
        if handler is None or handler in _UNCOUNTED_PATHS:
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()
        status, num_response_bytes = CLIENT_CLOSED_REQUEST, 0
        num_request_bytes = 0

        async def receive_and_count() -> Message:
            nonlocal num_request_bytes
            message = await receive()
            num_request_bytes += len(message.get("body", b""))
            return message

        async def send_and_count(message: Message) -> None:
            nonlocal status, num_response_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                num_response_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive_and_count, send_and_count)
        except Exception:
            # An outer layer answers it.
            status = 500
            raise
        finally:
            self._metrics.observe(
                handler=handler,
                method=scope["method"],
                status=status,
                duration_s=time.perf_counter() - start_s,
                num_request_bytes=num_request_bytes,
                num_response_bytes=num_response_bytes,
            )


def _handler(routes: Sequence[BaseRoute], scope: Scope) -> str:
    """The path of the route, such as "/v1/responses/{response_id}"; "none" if there is none."""
    found = _NO_HANDLER
    for route in routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route.path
        if match is Match.PARTIAL and found == _NO_HANDLER:
            found = route.path
    return found
