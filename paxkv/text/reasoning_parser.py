"""`ReasoningParser`: tells thoughts, between `<think>` and `</think>`, from the answer."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from paxkv.text.tokenizer import Tokenizer
from paxkv.text.tool_parsers.tag_finder import num_held_chars

_OPEN, THOUGHTS_END = "<think>", "</think>"


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningSplit:
    """Two pieces of text, the first before the second; either may be empty."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Reads one answer. However its text is cut into pieces, the same is found in it.

    Args:
        starts_thinking: The prompt ends in `<think>`, or the model leaves it out: its answer
            begins with thoughts either way. Else an answer without `<think>` in front has none.

    Attributes:
        had_thoughts: Whether there were some that have ended.
    """

    def __init__(self, *, starts_thinking: bool) -> None:
        self._starts_thinking = starts_thinking
        self._is_begun = False
        self._is_thinking = False
        self.had_thoughts = False
        # The start of what may be a tag.
        self._held = ""

    @property
    def stage(self) -> Literal["unknown", "thoughts", "answer"]:
        """What the text so far ends in; unknown while it may yet begin with thoughts."""
        if self._is_begun:
            return "thoughts" if self._is_thinking else "answer"
        return "thoughts" if self._starts_thinking else "unknown"

    def feed(self, text: str) -> ReasoningSplit:
        """What the next piece of text makes certain."""
        self._held += text
        if not self._is_begun and not self._begin():
            return ReasoningSplit()
        if not self._is_thinking:
            return ReasoningSplit(content=self._take(len(self._held)))
        thoughts, tag, _ = self._held.partition(THOUGHTS_END)
        if tag:
            self._is_thinking, self.had_thoughts = False, True
            self._take(len(thoughts) + len(tag))
            return ReasoningSplit(thoughts, self._take(len(self._held)))
        return ReasoningSplit(
            self._take(len(self._held) - num_held_chars(self._held, THOUGHTS_END))
        )

    def finish(self) -> ReasoningSplit:
        """What was held back, when no more text comes."""
        is_thinking = self._is_thinking or (not self._is_begun and self._starts_thinking)
        held = self._take(len(self._held))
        return ReasoningSplit(held) if is_thinking else ReasoningSplit(content=held)

    def _begin(self) -> bool:
        """Whether it is known by now if the answer begins with thoughts."""
        text = self._held.lstrip()
        if text.startswith(_OPEN):
            self._held, self._is_thinking = text[len(_OPEN) :], True
        elif _OPEN.startswith(text):
            return False
        else:
            self._is_thinking = self._starts_thinking
        self._is_begun = True
        return True

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken


def thought_token_ids(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, int] | None:
    """`<think>` and `</think>`; None where they are no tokens that the model can draw, each as a
    whole, and that are shown in a text.
    """
    ids = tokenizer.token_to_id(_OPEN), tokenizer.token_to_id(THOUGHTS_END)
    if None in ids or max(ids) >= vocab_size or tokenizer.special_token_ids.intersection(ids):
        return None
    return ids


# By the names that `--reasoning-parser` takes, which are vLLM's: whether an answer starts thinking.
REASONING_PARSERS: Mapping[str, bool] = {"qwen3": False, "deepseek_r1": True}
