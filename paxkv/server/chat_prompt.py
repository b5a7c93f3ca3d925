"""From the messages of a chat to the text of its prompt."""

from collections.abc import Mapping

from paxkv.errors import InvalidRequestError
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.openai_protocol import chat_messages

# What a template gets from us already; a caller must not set it a second time.
_RESERVED_TEMPLATE_ARGUMENTS = ("messages", "add_generation_prompt", "tools", "documents")


def render_chat(
    engine: EngineClient,
    messages: list[dict[str, object]],
    *,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, object] | None = None,
) -> str:
    """The prompt of a conversation. Takes a while for a long one: call it in a thread.

    Raises:
        InvalidRequestError: The messages cannot be used, or the model has no chat template.
    """
    if engine.chat_template is None:
        raise InvalidRequestError(
            "this model has no chat template; use /v1/completions instead.", param="messages"
        )
    for name in _RESERVED_TEMPLATE_ARGUMENTS:
        if template_kwargs and name in template_kwargs:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {name!r}.", param="chat_template_kwargs"
            )
    return engine.chat_template.render(
        chat_messages(messages),
        add_generation_prompt=add_generation_prompt,
        template_kwargs=template_kwargs,
    )
