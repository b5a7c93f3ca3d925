"""Converts arguments of earlier tool calls for chat templates."""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from paxkv.errors import InvalidRequestError

# Limit on nested objects and lists. Python's JSON encoder, which templates call, fails at about 900
# levels, and so does the decoder of a request body with such arguments.
MAX_DEPTH = 200
# The only key of a `CallText`, for templates that write arguments key by key.
_ONLY_KEY = "arguments"


class CallText(Mapping[str, object]):
    """Arguments that are not a JSON object, for example of a call that was cut off.

    Most templates write arguments with `tojson`, which writes this text unchanged. Templates that
    iterate over the arguments find one item, whose value is the text.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __getitem__(self, key: str) -> object:
        if key != _ONLY_KEY:
            raise KeyError(key)
        return self._text

    def __iter__(self) -> Iterator[str]:
        return iter((_ONLY_KEY,))

    def __len__(self) -> int:
        return 1


def template_arguments(
    arguments: object, *, decode: Callable[[bytes], object] = msgspec.json.decode
) -> Mapping[str, object]:
    """Converts the arguments of a call, in any form that a model wrote or a client sent.

    '{"a": 1}' -> {"a": 1}; None and blank text -> {}; '{"a": ' -> CallText('{"a": '); [1] ->
    CallText("[1]").

    Args:
        decode: Decodes JSON. Raises ValueError if the text should stay a text.

    Raises:
        InvalidRequestError: The arguments are not text, and are nested too deeply.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        check_depth("the arguments of a tool call", arguments)
        return arguments if isinstance(arguments, Mapping) else CallText(dump_json(arguments))
    if not arguments.strip():
        return {}
    try:
        found = decode(arguments.encode())
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return CallText(arguments)
    is_usable = isinstance(found, dict) and not is_deep(found)
    return found if is_usable else CallText(arguments)


def check_depth(name: str, value: object) -> None:
    """Rejects JSON values that are nested too deeply for templates.

    Args:
        name: Name of the value in the error message.

    Raises:
        InvalidRequestError: More than `MAX_DEPTH` objects and lists are nested.
    """
    if is_deep(value):
        raise InvalidRequestError(
            f"{name} may have at most {MAX_DEPTH} objects and lists inside each other. Send fewer "
            "levels, or the JSON as a string."
        )


def is_deep(value: object) -> bool:
    """Whether a JSON value has more than `MAX_DEPTH` nested objects and lists."""
    level = [value] if isinstance(value, (Mapping, list)) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [child for parent in level for child in _children(parent)]
    return bool(level)


def _children(value: object) -> Iterable[object]:
    """The objects and lists directly inside a JSON value."""
    values = value.values() if isinstance(value, Mapping) else value
    return [child for child in values if isinstance(child, (Mapping, list))]


def dump_json(
    value: object,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encodes a value as JSON; every `CallText` in it becomes its text, unchanged."""
    # A random placeholder for the texts, which clients cannot guess.
    placeholder = ""
    texts: list[str] = []

    def make_placeholder(value: object) -> str:
        nonlocal placeholder
        if not isinstance(value, CallText):
            raise TypeError(f"{type(value).__name__} is not a JSON value")
        placeholder = placeholder or uuid.uuid4().hex
        texts.append(str(value))
        return placeholder

    dumped = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=make_placeholder,
    )
    if not texts:
        return dumped
    # The order of `texts` is that of the placeholders in the JSON.
    first, *others = dumped.split(f'"{placeholder}"')
    return first + "".join(text + other for text, other in zip(texts, others, strict=True))
