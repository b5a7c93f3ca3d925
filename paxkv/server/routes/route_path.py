"""The path of a request as routes see it."""

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """Removes `--root-path` from the start of the path, if it is there.

    With "/api", both "/api/v1/models" and "/v1/models" become "/v1/models".
    """
    path, root_path = scope["path"], scope.get("root_path", "")
    inside = path.removeprefix(root_path)
    # "/apiv1" is not below "/api".
    return inside if root_path and inside.startswith("/") else path


def is_below(path: str, prefix: str) -> bool:
    """Whether `path` is `prefix` or below it: "/v1/a/b" is below "/v1/a", "/v1/ab" is not."""
    return path == prefix or path.startswith(f"{prefix}/")
