"""Errors of forms that cannot be compiled, without and with the name of the client's field."""

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import InvalidRequestError


class SchemaError(ValueError):
    """A JSON schema cannot be used.

    Args:
        reason: Names places in the schema as JSON pointers, such as "#/properties/a".
        tool: The tool that has the schema, in the schema of a list of calls; None otherwise.
    """

    def __init__(self, reason: str, *, tool: str | None = None) -> None:
        super().__init__(reason)
        self.tool = tool


class FormError(InvalidRequestError):
    """A form cannot be compiled. The message names the field in which the client sent the form.

    Args:
        params: The form, with the name of the field.
        problem: The message after the name of the field: "cannot be compiled: no text fits it."
        tool: As in `SchemaError`.
    """

    def __init__(
        self, params: StructuredOutputsParams, problem: str, *, tool: str | None = None
    ) -> None:
        field = params.field_of(tool)
        super().__init__(f"{field} {problem}", param=field.name)
        self.problem = problem
        self.tool = tool
