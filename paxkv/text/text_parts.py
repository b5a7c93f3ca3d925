"""`TextParts`: the parts of a message, in a list that templates can also use as a text."""

from collections.abc import Mapping, Sequence


class TextParts(list[Mapping[str, object]]):
    """A list of parts `{"type": "text", "text": ...}` that acts as a text where one is needed.

    A template that loops over the result of a tool gets the parts, as in transformers. A template
    that writes the result without a loop, adds it to a text or calls a method of strings gets
    `text`. With a plain list, it would write Python's `[{'type': ...}]`, or fail.

    Args:
        text: The texts of the parts, joined.
    """

    def __init__(self, parts: Sequence[Mapping[str, object]], text: str) -> None:
        super().__init__(parts)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> object:
        return self._text + other if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other: str) -> str:
        return other + self._text

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._text, name)
