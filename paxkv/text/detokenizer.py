"""`IncrementalDetokenizer`: turns a request's tokens into text as they arrive."""

import dataclasses
from collections.abc import Sequence

from paxkv.config.sampling_params import SamplingParams
from paxkv.text.stop_strings import StopStringFinder
from paxkv.text.tokenizer import Tokenizer

# Decoders return this for invalid UTF-8, and for a character that is not complete yet.
REPLACEMENT_CHAR = "\N{REPLACEMENT CHARACTER}"
# Number of last prompt tokens that are decoded together with the first new token. SentencePiece
# decoders show the space before a word only after another token.
NUM_CONTEXT_TOKENS = 5
# Number of last prompt tokens among which tokens with text are searched. A chat's prompt may end in
# tokens without text.
MAX_PROMPT_TOKENS = 32
# An unfinished UTF-8 character has at most 3 bytes, and each token has at least one byte.
MAX_UNFINISHED_TOKENS = 3
# More pending tokens than this are not an unfinished character. Without a limit, all of them would
# be decoded again for every token.
MAX_PENDING_TOKENS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoppedByString:
    """A stop string ended the request.

    Args:
        stop_string: The stop string that was found.
        num_tokens: Number of new tokens up to the end of the stop string. Ignore further tokens.
    """

    stop_string: str
    num_tokens: int


class IncrementalDetokenizer:
    """Turns the tokens of one request into text as they arrive.

    `text` never ends in an incomplete UTF-8 character or a possible start of a stop string. After
    the last token, `text` is the complete decoded text, cut at a stop string.
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
        self._num_drained_chars = 0

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        return self._decoded[: self._num_shown_chars]

    def drain_new_text(self) -> str:
        """Text that may be shown and was not returned by an earlier call."""
        new_text = self._decoded[self._num_drained_chars : self._num_shown_chars]
        self._num_drained_chars = self._num_shown_chars
        return new_text

    def update(self, new_token_ids: Sequence[int], *, is_last: bool) -> StoppedByString | None:
        """Adds the next tokens. Must not be called after a stop string.

        Args:
            is_last: No further tokens follow, so no text is held any longer.

        Returns:
            The stop string that these tokens completed, or None.
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
        # Text of the first `min_tokens` tokens may start a stop string, but must not complete it.
        match = self._finder.feed(text, may_end=self._num_tokens > self._min_tokens)
        if match is None:
            return None
        cut = 0 if self._include_stop_str else len(match.stop_string)
        self._num_shown_chars = match.num_chars - cut
        return StoppedByString(stop_string=match.stop_string, num_tokens=num_tokens)


class _TextStream:
    """Decodes a window of the latest tokens, because tokens cannot be decoded one by one.

    The window consists of `context` tokens, which are shown already, and `pending` tokens. The text
    of the window after the text of the context is new, unless it ends in an incomplete character.
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
        # As in vLLM: if special tokens are omitted, there are no spaces between them to remove.
        self._joins_added = not (skip_special_tokens or spaces_between_special_tokens)
        self._last_is_added = False
        self._context, self._pending = self._split_prompt_end(prompt_token_ids)
        self._context_text = self._decode(self._context)
        # The replacement text of an incomplete character at the prompt's end, which new tokens may
        # complete.
        self._half_text = ""
        if self._pending:
            self._half_text = self._new_part(self._decode(self._context + self._pending))

    def _split_prompt_end(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Splits the prompt's last tokens into context and tokens of an incomplete character."""
        last = [i for i in prompt_token_ids[-MAX_PROMPT_TOKENS:] if self._has_text(i)]
        for end in range(len(last), max(len(last) - MAX_UNFINISHED_TOKENS, 0) - 1, -1):
            # If SentencePiece byte tokens start inside a character, the whole run decodes as
            # invalid. One of these four starts is at the start of a character.
            for num_tokens in range(NUM_CONTEXT_TOKENS, NUM_CONTEXT_TOKENS + 4):
                context = last[max(end - num_tokens, 0) : end]
                if not self._decode(context).endswith(REPLACEMENT_CHAR):
                    # Without a context, the window may begin inside a character.
                    is_half = bool(context) or len(prompt_token_ids) <= MAX_PROMPT_TOKENS
                    return context, last[end:] if is_half else []
        return [], []

    def push(self, token_id: int) -> str:
        """Adds one token; returns the text that is now certain, which is often empty."""
        # Tokens without text would only enlarge the window.
        if not self._has_text(token_id):
            return ""
        if self._joins_added:
            before, self._last_is_added = self._last_is_added, self._is_added(token_id)
            if before and self._last_is_added:
                return self.flush() + self._show_as_written(token_id)
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        # Hold the token too if it added no text. If a context has no text, SentencePiece decoders
        # strip the space before the next word.
        if text.endswith(REPLACEMENT_CHAR) or len(text) <= len(self._context_text):
            return self._flush_invalid_run(text)
        return self._show_pending(text)

    def flush(self) -> str:
        """Returns the text of pending tokens, even if its last character is incomplete."""
        if not self._pending:
            return ""
        return self._show_pending(self._decode(self._context + self._pending))

    def _show_pending(self, text: str) -> str:
        new_text = self._new_part(text)
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        return new_text

    def _new_part(self, text: str) -> str:
        """The part of the window's text that is not shown yet."""
        new_text = text[len(self._context_text) :]
        if not self._half_text:
            return new_text
        # After a prompt "a \ufffd", the new part of " \ufffdb" is "b", and that of " é" is "é".
        half, self._half_text = self._half_text, ""
        is_half_still = new_text.startswith(half)
        return new_text.removeprefix(half if is_half_still else half.rstrip(REPLACEMENT_CHAR))

    def _show_as_written(self, token_id: int) -> str:
        """The literal text of an added token; a decoder might add a space before it."""
        self._context = [token_id]
        self._context_text = self._decode(self._context)
        return self._tokenizer.added_token_texts[token_id]

    def _is_added(self, token_id: int) -> bool:
        return token_id in self._tokenizer.added_token_texts

    def _flush_invalid_run(self, text: str) -> str:
        """Shows the start of a long run of invalid UTF-8, up to a token at which it can be cut."""
        if len(self._pending) <= MAX_PENDING_TOKENS:
            return ""
        last_cut = len(self._pending) - MAX_UNFINISHED_TOKENS
        for cut in range(last_cut, last_cut - MAX_UNFINISHED_TOKENS - 1, -1):
            head = self._decode(self._context + self._pending[:cut])
            tail = self._decode(self._pending[cut:])
            if head + tail == text:
                new_text = self._new_part(head)
                self._context, self._context_text = [], ""
                self._pending = self._pending[cut:]
                return new_text
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_text(token_id, skip_special_tokens=self._skip_special_tokens)
