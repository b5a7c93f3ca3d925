"""`ReasoningParser`: separates thoughts, between `<think>` and `</think>`, from the answer."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from paxkv.text.tokenizer import Tokenizer
from paxkv.text.tool_parsers.tag_finder import num_held_chars

_OPEN, THOUGHTS_END = "<think>", "</think>"


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningSplit:
    """A piece of thoughts and the following piece of the answer; either may be empty."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Parses one answer. The result does not depend on how the text is cut into pieces.

    Args:
        starts_thinking: The answer begins with thoughts even without `<think>`, because the prompt
            ends in `<think>` or the model omits it. If False, an answer that does not begin with
            `<think>` has no thoughts.

    Attributes:
        had_thoughts: Whether the answer had thoughts that have ended.
    """

    def __init__(self, *, starts_thinking: bool) -> None:
        self._starts_thinking = starts_thinking
        self._has_begun = False
        self._is_thinking = False
        self.had_thoughts = False
        # Text that may be the start of a tag.
        self._held = ""

    @property
    def stage(self) -> Literal["unknown", "thoughts", "answer"]:
        """The part in which the text so far ends; unknown while thoughts may still begin."""
        if self._has_begun:
            return "thoughts" if self._is_thinking else "answer"
        return "thoughts" if self._starts_thinking else "unknown"

    def feed(self, text: str) -> ReasoningSplit:
        """Reads the next piece of text; returns the pieces that are now certain."""
        self._held += text
        if not self._has_begun and not self._begin():
            return ReasoningSplit()
        if not self._is_thinking:
            return ReasoningSplit(content=self._pop(len(self._held)))
        thoughts, tag, _ = self._held.partition(THOUGHTS_END)
        if tag:
            self._is_thinking, self.had_thoughts = False, True
            self._pop(len(thoughts) + len(tag))
            return ReasoningSplit(thoughts, self._pop(len(self._held)))
        return ReasoningSplit(self._pop(len(self._held) - num_held_chars(self._held, THOUGHTS_END)))

    def finish(self) -> ReasoningSplit:
        """Ends the answer; returns the text that was held."""
        is_thinking = self._is_thinking or (not self._has_begun and self._starts_thinking)
        held = self._pop(len(self._held))
        return ReasoningSplit(held) if is_thinking else ReasoningSplit(content=held)

    def _begin(self) -> bool:
        """Decides whether the answer begins with thoughts; False if more text is needed."""
        text = self._held.lstrip()
        if text.startswith(_OPEN):
            self._held, self._is_thinking = text[len(_OPEN) :], True
        elif _OPEN.startswith(text):
            return False
        else:
            self._is_thinking = self._starts_thinking
        self._has_begun = True
        return True

    def _pop(self, num_chars: int) -> str:
        popped, self._held = self._held[:num_chars], self._held[num_chars:]
        return popped


def thought_token_ids(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, int] | None:
    """Ids of `<think>` and `</think>`.

    None unless both are single tokens that the model can sample and that are not special tokens.
    """
    ids = tokenizer.token_to_id(_OPEN), tokenizer.token_to_id(THOUGHTS_END)
    if None in ids or max(ids) >= vocab_size or tokenizer.special_token_ids.intersection(ids):
        return None
    return ids


# Name in `--reasoning-parser` (as in vLLM) -> `starts_thinking` of `ReasoningParser`.
REASONING_PARSERS: Mapping[str, bool] = {"qwen3": False, "deepseek_r1": True}
