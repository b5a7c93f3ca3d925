"""`ChatTemplateKwargs`: chat template variables that the server sets for every chat."""

import dataclasses
from collections.abc import Mapping

from paxkv.errors import ConfigError

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclasses.dataclass(frozen=True, slots=True)
class ChatTemplateKwargs:
    """The value of `--default-chat-template-kwargs`."""

    values: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_fields(cls, fields: object) -> "ChatTemplateKwargs":
        """Reads a JSON object such as {"enable_thinking": false}.

        Raises:
            ConfigError: It is not an object, or it sets a variable that has its own request field.
        """
        if not isinstance(fields, Mapping):
            raise ConfigError(f"expected a JSON object of template variables, got {fields!r}.")
        reserved = sorted(_RESERVED & fields.keys())
        if reserved:
            raise ConfigError(
                f"the object must not set {', '.join(reserved)}, which each request sets itself."
            )
        return cls(dict(fields))

    def with_request(self, values: Mapping[str, object] | None) -> dict[str, object]:
        """The variables of one chat. The request's values override the server's."""
        return {**self.values, **(values or {})}
