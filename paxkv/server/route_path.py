"""The path of a request as routes see it."""

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """The path without `--root-path`: "/api/v1/models" under "/api" is "/v1/models"."""
    path, root_path = scope["path"], scope.get("root_path", "")
    inside = path.removeprefix(root_path)
    # "/apiv1" is not below "/api".
    return inside if root_path and inside.startswith("/") else path
