"""Chooses the format of /metrics that a client accepts."""

import functools
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

Encode = Callable[[CollectorRegistry], bytes]

_TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# prometheus_client's other escapings replace the colon in "vllm:num_requests_running", although
# OpenMetrics allows it.
_encode_openmetrics = functools.partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)


def choose_format(accept: str) -> tuple[Encode, str]:
    """Returns an encoder and its content type: OpenMetrics if `accept` names it, else text.

    Args:
        accept: The request's Accept header; "" accepts everything.
    """
    for media_range in accept.split(","):
        media_type, *parameters = (part.strip().lower() for part in media_range.split(";"))
        is_refused = any(
            parameter.replace(" ", "") in ("q=0", "q=0.0", "q=0.00", "q=0.000")
            for parameter in parameters
        )
        if media_type == "application/openmetrics-text" and not is_refused:
            return _encode_openmetrics, _OPENMETRICS_TYPE
    return generate_latest, _TEXT_TYPE
