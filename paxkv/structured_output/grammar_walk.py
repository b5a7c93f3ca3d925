"""`find_dead_end`: generates the beginnings of some answers, to find out if a grammar fails."""

from collections.abc import Collection

import llguidance
import numpy as np

# Some limits are reached only after the first tokens, as in an object with many properties.
_NUM_TRIED_TOKENS = 4
_NUM_JSON_TOKENS = 48
# Texts that a walk prefers, in order. The first walk closes objects and lists as early as
# possible; the second one adds members for as long as possible.
_PREFERRED_JSON = (('"', "}", "]", ","), ('"', ",", "}", "]"))
_MAX_SHOWN_CHARS = 80


def find_dead_end(
    matcher: llguidance.LLMatcher,
    tokenizer: llguidance.LLTokenizer,
    *,
    eos_token_ids: Collection[int],
    is_json: bool,
) -> str | None:
    """Why some answer cannot be continued, with llguidance's error; None if no walk fails.

    Args:
        matcher: A matcher before its first token; it is copied.
        eos_token_ids: Tokens that end a complete answer.
        is_json: Whether the answers are JSON. Schemas may have dead ends after more tokens.
    """
    if not is_json:
        return _walk(matcher.deep_copy(), tokenizer, eos_token_ids, (), _NUM_TRIED_TOKENS)
    for texts in _PREFERRED_JSON:
        preferred = [token_ids[0] for token_ids in map(tokenizer.greedy_tokenize, texts)]
        dead_end = _walk(matcher.deep_copy(), tokenizer, eos_token_ids, preferred, _NUM_JSON_TOKENS)
        if dead_end is not None:
            return dead_end
    return None


def _walk(
    matcher: llguidance.LLMatcher,
    tokenizer: llguidance.LLTokenizer,
    eos_token_ids: Collection[int],
    preferred: Collection[int],
    num_tokens: int,
) -> str | None:
    token_ids: list[int] = []
    for _ in range(num_tokens):
        mask_np = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error() or not mask_np.any():
            text = tokenizer.decode_str(token_ids)[-_MAX_SHOWN_CHARS:]
            return f"{matcher.get_error() or 'NoExtensionBias'} (after {text!r})"
        token_id = _choose(mask_np, preferred, eos_token_ids)
        if token_id is None:
            return None
        matcher.consume_token(token_id)
        token_ids.append(token_id)
    return None


def _choose(
    mask_np: np.ndarray,  # u8[num_mask_words * 4]
    preferred: Collection[int],
    eos_token_ids: Collection[int],
) -> int | None:
    """The next token of a walk; None if the answer can only end."""
    best = next((i for i in preferred if mask_np[i // 8] >> (i % 8) & 1), None)
    if best is not None:
        return best
    for byte_idx in np.flatnonzero(mask_np):
        for token_id in range(8 * int(byte_idx), 8 * int(byte_idx) + 8):
            if mask_np[byte_idx] >> (token_id % 8) & 1 and token_id not in eos_token_ids:
                return token_id
    return None
