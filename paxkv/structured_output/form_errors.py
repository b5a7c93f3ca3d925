"""Why a form cannot be compiled: the errors, before and after the client's field is known."""

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import InvalidRequestError


class SchemaError(ValueError):
    """A JSON schema cannot be used.

    Args:
        reason: Names a place within the schema as a JSON pointer: "#/properties/a".
        tool: Whose schema it is, in the schema of a list of calls; None is the whole form.
    """

    def __init__(self, reason: str, *, tool: str | None = None) -> None:
        super().__init__(reason)
        self.tool = tool


class FormError(InvalidRequestError):
    """A form that cannot be compiled. Names the field that the client sent it in.

    Args:
        params: Of the request, which know the field.
        problem: What follows the name of the field: "cannot be compiled: no text fits it."
        tool: As in `SchemaError`.
    """

    def __init__(
        self, params: StructuredOutputsParams, problem: str, *, tool: str | None = None
    ) -> None:
        field = params.field_of(tool)
        super().__init__(f"{field} {problem}", param=field.name)
        self.problem = problem
        self.tool = tool
