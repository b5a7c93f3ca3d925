"""How much of a text may be the beginning of a tag."""


def num_held_chars(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with, the whole tag left out.

    "a <to", "<tool_call>" -> 3.
    """
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
