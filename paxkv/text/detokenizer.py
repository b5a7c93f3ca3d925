"""Incremental detokenizer of one request: token ids in, text that may be shown out."""

import dataclasses
from collections.abc import Sequence

from paxkv.config.sampling_params import SamplingParams
from paxkv.text.stop_strings import StopStringFinder
from paxkv.text.tokenizer import Tokenizer

# What a decoder makes of bytes that are no UTF-8, and of a character whose rest is still to come.
REPLACEMENT_CHAR = "\N{REPLACEMENT CHARACTER}"
# Tokens of the prompt's end that are decoded with the first new one: in SentencePiece vocabularies
# the space before a word shows only when something stands before it.
NUM_CONTEXT_TOKENS = 5
# Those with text are looked for among so many: a chat's prompt may end in tokens without any.
MAX_PROMPT_TOKENS = 32
# An unfinished UTF-8 character has at most 3 bytes, and a token at least one.
MAX_UNFINISHED_TOKENS = 3
# So many pending tokens are no unfinished character; without a limit they would be decoded again
# at every token.
MAX_PENDING_TOKENS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoppedByString:
    """A stop string ended the request.

    Args:
        stop_string: Which one.
        num_tokens: How many of the new tokens were needed for it; the rest is to be ignored.
    """

    stop_string: str
    num_tokens: int


class IncrementalDetokenizer:
    """Turns the tokens of one request into text as they come.

    `text` never ends in half a UTF-8 character, nor in what may still become a stop string; after
    the last token it is the decoded whole (cut at a stop string).
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], sampling_params: SamplingParams
    ) -> None:
        self._include_stop_str = sampling_params.include_stop_str_in_output
        self._finder = StopStringFinder(sampling_params.stop_strings)
        self._stream = _TextStream(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=sampling_params.skip_special_tokens,
            spaces_between_special_tokens=sampling_params.spaces_between_special_tokens,
        )
        self._min_tokens = sampling_params.min_tokens
        self._num_tokens = 0
        self._decoded = ""
        self._num_shown_chars = 0
        self._num_taken_chars = 0

    @property
    def text(self) -> str:
        """All text that may be shown by now."""
        return self._decoded[: self._num_shown_chars]

    def take_new_text(self) -> str:
        """Text that may be shown and was not taken yet."""
        new_text = self._decoded[self._num_taken_chars : self._num_shown_chars]
        self._num_taken_chars = self._num_shown_chars
        return new_text

    def update(self, new_token_ids: Sequence[int], *, is_last: bool) -> StoppedByString | None:
        """Takes the next tokens.

        Args:
            is_last: No more tokens will come, so nothing is held back any longer.

        Returns:
            The stop string that these tokens completed, or None. Nothing may follow it.
        """
        for num_tokens, token_id in enumerate(new_token_ids, start=1):
            self._num_tokens += 1
            stopped = self._append(self._stream.push(token_id), num_tokens)
            if stopped:
                return stopped
        if is_last:
            stopped = self._append(self._stream.flush(), len(new_token_ids))
            if stopped:
                return stopped
            self._num_shown_chars = len(self._decoded)
        else:
            self._num_shown_chars = len(self._decoded) - self._finder.num_held_chars
        return None

    def _append(self, text: str, num_tokens: int) -> StoppedByString | None:
        self._decoded += text
        # Text of the first `min_tokens` tokens may begin a stop string, but completes none.
        match = self._finder.feed(text, may_end=self._num_tokens > self._min_tokens)
        if match is None:
            return None
        cut = 0 if self._include_stop_str else len(match.stop_string)
        self._num_shown_chars = match.num_chars - cut
        return StoppedByString(stop_string=match.stop_string, num_tokens=num_tokens)


class _TextStream:
    """Decodes a window of the latest tokens, because tokens do not decode one by one.

    The window is `context` (shown already) and `pending` tokens. Their text beyond that of the
    context alone is new, unless it ends in a character that is not finished.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # As in vLLM: those that are left out need no spaces taken away.
        self._joins_added = not (skip_special_tokens or spaces_between_special_tokens)
        self._last_is_added = False
        self._context, self._pending = self._split_prompt_end(prompt_token_ids)
        self._context_text = self._decode(self._context)
        # How the prompt shows the half of a character that is pending: what comes may finish it.
        self._half_text = ""
        if self._pending:
            self._half_text = self._take_new_text(self._decode(self._context + self._pending))

    def _split_prompt_end(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The context of the first new token, and behind it the tokens of half a character."""
        last = [i for i in prompt_token_ids[-MAX_PROMPT_TOKENS:] if self._has_text(i)]
        for end in range(len(last), max(len(last) - MAX_UNFINISHED_TOKENS, 0) - 1, -1):
            # Byte tokens of SentencePiece that begin inside a character are all bad, to their end:
            # of so many starts one is at a character's.
            for num_tokens in range(NUM_CONTEXT_TOKENS, NUM_CONTEXT_TOKENS + 4):
                context = last[max(end - num_tokens, 0) : end]
                if not self._decode(context).endswith(REPLACEMENT_CHAR):
                    # Without a context, the window may begin inside of a character.
                    is_half = bool(context) or len(prompt_token_ids) <= MAX_PROMPT_TOKENS
                    return context, last[end:] if is_half else []
        return [], []

    def push(self, token_id: int) -> str:
        """Takes one token and returns the text that is certain now, often empty."""
        # Tokens without text would only make the window longer.
        if not self._has_text(token_id):
            return ""
        if self._joins_added:
            before, self._last_is_added = self._last_is_added, self._is_added(token_id)
            if before and self._last_is_added:
                return self.flush() + self._show_as_written(token_id)
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        # Text that did not grow is held too: a context of no text would lose the space that
        # SentencePiece decoders strip from the start.
        if text.endswith(REPLACEMENT_CHAR) or len(text) <= len(self._context_text):
            return self._give_up_on_part(text)
        return self._show_pending(text)

    def flush(self) -> str:
        """Returns what is pending, finished or not."""
        if not self._pending:
            return ""
        return self._show_pending(self._decode(self._context + self._pending))

    def _show_pending(self, text: str) -> str:
        new_text = self._take_new_text(text)
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        return new_text

    def _take_new_text(self, text: str) -> str:
        """What the text of the window has beyond what is shown."""
        new_text = text[len(self._context_text) :]
        if not self._half_text:
            return new_text
        # Behind a prompt of "a \ufffd", " \ufffdb" is "b" and " é" is "é".
        half, self._half_text = self._half_text, ""
        is_half_still = new_text.startswith(half)
        return new_text.removeprefix(half if is_half_still else half.rstrip(REPLACEMENT_CHAR))

    def _show_as_written(self, token_id: int) -> str:
        """The text of an added token by itself: a decoder might put a space before it."""
        self._context = [token_id]
        self._context_text = self._decode(self._context)
        return self._tokenizer.added_token_texts[token_id]

    def _is_added(self, token_id: int) -> bool:
        return token_id in self._tokenizer.added_token_texts

    def _give_up_on_part(self, text: str) -> str:
        """Shows the start of a long run of bad UTF-8, up to a token where it can be cut."""
        if len(self._pending) <= MAX_PENDING_TOKENS:
            return ""
        last_cut = len(self._pending) - MAX_UNFINISHED_TOKENS
        for cut in range(last_cut, last_cut - MAX_UNFINISHED_TOKENS - 1, -1):
            head = self._decode(self._context + self._pending[:cut])
            tail = self._decode(self._pending[cut:])
            if head + tail == text:
                new_text = self._take_new_text(head)
                self._context, self._context_text = [], ""
                self._pending = self._pending[cut:]
                return new_text
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_text(token_id, skip_special_tokens=self._skip_special_tokens)
