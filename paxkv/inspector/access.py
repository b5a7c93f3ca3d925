"""`check_access`: restricts the inspector to this machine unless the operator allows others."""

import ipaddress

from starlette.requests import Request

from paxkv.config.server_config import ServerConfig
from paxkv.errors import InvalidRequestError


class InspectorOffError(InvalidRequestError):
    """The inspector is off for this request."""

    http_status = 403


def check_access(request: Request, config: ServerConfig) -> None:
    """Rejects requests that the operator's settings do not allow.

    Raises:
        InspectorOffError: The inspector is off, or a page of another site sent the request (opening
            a link from there is allowed). Or the inspector is on for this machine only, and the
            `Host` header names another one. This protects against DNS rebinding: another site's
            name may point to this machine.
    """
    if config.enable_inspector is False:
        raise InspectorOffError("the inspector is off: the server runs with --no-enable-inspector.")
    if config.enable_inspector is None:
        if not is_loopback(config.host):
            raise InspectorOffError(
                f"the inspector is off, because other machines can reach {config.host}. Start the "
                "server with --enable-inspector to allow it."
            )
        host = _host_name(request.headers.get("host", ""))
        if not is_loopback(host):
            raise InspectorOffError(
                f"the inspector is for this machine alone, but the request is for host {host!r}. "
                "Open it as http://localhost, or start the server with --enable-inspector."
            )
    # Only browsers send this header. Other clients need no check: no other site controls them.
    site = request.headers.get("sec-fetch-site", "none")
    is_navigation = request.headers.get("sec-fetch-mode") == "navigate"
    if site not in ("same-origin", "none") and not (is_navigation and request.method == "GET"):
        raise InspectorOffError("the inspector answers its own page, not pages of other sites.")


def _host_name(host_header: str) -> str:
    """Returns the name in "localhost:8000", or the address in "[::1]:8000".

    `request.url` is no substitute: with a malformed header, it has the server's own address.
    """
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    return host_header.partition(":")[0]


def is_loopback(host: str) -> bool:
    """True for "localhost", its subdomains and loopback addresses."""
    host = host.strip("[]").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
