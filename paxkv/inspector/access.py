"""Who may open the inspector: this machine, and others only where the operator said so."""

import ipaddress

from starlette.requests import Request

from paxkv.config.engine_config import ServerConfig
from paxkv.errors import InvalidRequestError


class InspectorOffError(InvalidRequestError):
    """The inspector is not for this client."""

    http_status = 403


def check_access(request: Request, config: ServerConfig) -> None:
    """Refuses requests that the operator has not allowed.

    Raises:
        InspectorOffError: The inspector is off; or it is on for this machine alone, and the
            request names another host (a web page elsewhere may have sent the browser here by a
            name of its own); or a page of another site has sent it.
    """
    if config.enable_inspector is False:
        raise InspectorOffError("the inspector is off: the server runs with --no-enable-inspector.")
    if config.enable_inspector is None:
        if not is_loopback(config.host):
            raise InspectorOffError(
                f"the inspector is off, because others can reach {config.host}. Start the server "
                "with --enable-inspector to serve it there."
            )
        host = _host_name(request.headers.get("host", ""))
        if not is_loopback(host):
            raise InspectorOffError(
                f"the inspector is for this machine alone, and the request is for {host!r}. Open "
                "it as http://localhost, or start the server with --enable-inspector."
            )
    # Browsers say where a request comes from; other clients do not, and may as well ask directly.
    site = request.headers.get("sec-fetch-site", "none")
    is_navigation = request.headers.get("sec-fetch-mode") == "navigate"
    if site not in ("same-origin", "none") and not (is_navigation and request.method == "GET"):
        raise InspectorOffError("the inspector answers its own page, not those of other sites.")


def _host_name(host_header: str) -> str:
    """The name in "localhost:8000", or the address in "[::1]:8000".

    Not that of `request.url`, which is our own address where the header is malformed.
    """
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    return host_header.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine, as seen from itself."""
    host = host.strip("[]").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
