"""Finds the end of a text that may be the beginning of a tag."""


def num_held_chars(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a beginning of `tag`, but not the whole tag.

    "a <to", "<tool_call>" -> 3.
    """
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
