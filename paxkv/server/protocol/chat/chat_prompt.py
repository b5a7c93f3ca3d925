"""Renders the messages of a chat to the text of its prompt."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from paxkv.config.server_config import ServerConfig
from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.server.engine_protocol import ChatTemplate, EngineClient
from paxkv.server.protocol.chat.chat_messages import chat_messages
from paxkv.text.chat_template import ChatTemplate as RequestTemplate
from paxkv.text.leading_messages import count_leading_chars

# Variables of templates that the server sets itself, so a request must not set them.
_RESERVED_TEMPLATE_ARGUMENTS = ("messages", "add_generation_prompt", "tools", "documents")
# Marks the end of the last message while it is rendered, with a private-use character. If the
# template strips messages, the space after the mark is lost.
_END_MARK = "\N{NUMBER SIGN}\ue0f1\N{NUMBER SIGN}"
_END = _END_MARK + " "


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """The prompt of a conversation.

    Args:
        num_leading_chars: See `count_leading_chars`; None if they were not counted.
    """

    text: str
    num_leading_chars: int | None = None


def render_chat(
    engine: EngineClient,
    messages: list[dict[str, object]],
    *,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, object] | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
    documents: Sequence[Mapping[str, object]] | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    counts_leading_chars: bool = False,
) -> RenderedChat:
    """Renders the prompt of a conversation. Call it in a thread, because long ones take a while.

    Args:
        continue_final_message: End the prompt with the text of the last message, so that the answer
            continues it.
        chat_template: The template to use instead of the model's own.

    Raises:
        InvalidRequestError: The messages are not valid, or the model has no chat template.
    """
    for name in _RESERVED_TEMPLATE_ARGUMENTS:
        if template_kwargs and name in template_kwargs:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {name!r}.", param="chat_template_kwargs"
            )
    checked = chat_messages(messages)
    if continue_final_message:
        checked[-1] = _with_end_mark(checked[-1])
    render = functools.partial(
        _template(engine, chat_template).render,
        add_generation_prompt=add_generation_prompt,
        template_kwargs=template_kwargs,
        tools=tools,
        documents=documents,
    )
    text = render(checked)
    num_leading_chars = None
    if counts_leading_chars:
        num_leading_chars = count_leading_chars(text, checked, render)
    if continue_final_message:
        text = _cut_at_end_mark(text)
    return RenderedChat(text=text, num_leading_chars=num_leading_chars)


def _cut_at_end_mark(text: str) -> str:
    head, mark, rest = text.rpartition(_END_MARK)
    if not mark:
        raise InvalidRequestError(
            "the chat template does not show the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return head if rest.startswith(" ") else head.rstrip()


def check_template_allowed(chat_template: str | None, config: ServerConfig) -> None:
    """Checks that a request may have its own template. Templates are programs.

    Raises:
        UnsupportedFeatureError: The server does not trust the templates of requests.
    """
    if chat_template is not None and not config.trust_request_chat_template:
        raise UnsupportedFeatureError(
            "a request may have its own chat_template only if the server was started with "
            "--trust-request-chat-template; leave it out.",
            param="chat_template",
        )


def _template(engine: EngineClient, source: str | None) -> ChatTemplate:
    if source is not None:
        special_tokens = engine.tokenizer.special_tokens if engine.tokenizer is not None else {}
        return RequestTemplate(source, special_tokens=special_tokens)
    if engine.chat_template is None:
        if engine.tokenizer is None:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer, so it cannot chat; send token ids, "
                "such as [1, 2, 3], as the prompt of /v1/completions.",
                param="messages",
            )
        raise InvalidRequestError(
            "this model has no chat template; use /v1/completions instead, or start the server "
            "with --chat-template.",
            param="messages",
        )
    return engine.chat_template


def _with_end_mark(message: dict[str, object]) -> dict[str, object]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _END}
    if not content:
        raise InvalidRequestError(
            "the last message has no content that could be continued.",
            param="continue_final_message",
        )
    *others, last = content
    return {**message, "content": [*others, {**last, "text": last["text"] + _END}]}
