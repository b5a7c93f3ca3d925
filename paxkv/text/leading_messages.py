"""The part of a rendered conversation that other conversations are likely to share."""

from collections.abc import Callable, Sequence

from paxkv.errors import InvalidRequestError
from paxkv.text.chat_template import Message

LEADING_ROLES = frozenset({"system", "developer"})
# The content of the message after the leading ones. It has no character that templates strip.
_PROBE = "\N{NUMBER SIGN}\ue0f2\N{NUMBER SIGN}"


def count_leading_chars(
    text: str, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> int:
    """Number of characters of a prompt before the first message of the user.

    These characters are the system messages, the tools, and what the template writes before them.
    To count them, the system messages are rendered again, followed by another user message. The
    cost does not depend on the later messages of the conversation.

    Args:
        text: The rendered conversation.
        render: Renders a conversation in the same way.

    Returns:
        0 if no user message follows the system messages, or if the template renders them
        differently before another message.
    """
    roles = [message.get("role") for message in messages]
    num_leading = next((i for i, role in enumerate(roles) if role not in LEADING_ROLES), len(roles))
    if roles[num_leading : num_leading + 1] != ["user"]:
        return 0
    probe = {"role": "user", "content": _PROBE}
    try:
        rendered = render([*messages[:num_leading], probe])
    except InvalidRequestError:
        # The template may accept only some conversations, and this one is not the request's own.
        return 0
    leading, mark, _ = rendered.partition(_PROBE)
    return len(leading) if mark and text.startswith(leading) else 0
