"""Text grows with each token, has no incomplete characters, and ends as the decoded tokens."""

import itertools
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from paxkv.config.sampling_params import SamplingParams
from paxkv.text.detokenizer import IncrementalDetokenizer, StoppedByString
from paxkv.text.tokenizer import Tokenizer
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

REPLACEMENT = "�"


def stream(
    tokenizer: Tokenizer,
    token_ids: list[int],
    *,
    prompt_token_ids: list[int] = (),
    tokens_per_update: int = 1,
    **params: object,
) -> tuple[list[str], StoppedByString | None]:
    """New text after each update, and the stop string."""
    detokenizer = IncrementalDetokenizer(
        tokenizer, list(prompt_token_ids), SamplingParams(**params)
    )
    pieces, stopped = [], None
    starts = range(0, len(token_ids), tokens_per_update)
    for start in starts:
        batch = token_ids[start : start + tokens_per_update]
        stopped = detokenizer.update(batch, is_last=start == starts[-1])
        pieces.append(detokenizer.drain_new_text())
        if stopped:
            break
    assert "".join(pieces) == detokenizer.text
    return pieces, stopped


def cut(data: bytes, lengths: list[int]) -> list[bytes]:
    pieces = []
    for length in itertools.cycle(lengths):
        if not data:
            return pieces
        pieces.append(data[:length])
        data = data[length:]


def as_tokens(pieces: list[bytes]) -> tuple[Tokenizer, list[int]]:
    """A byte-level tokenizer with a token for each piece, and the pieces' ids."""
    words = [bytes([byte]) for byte in range(256)]
    words += [piece for piece in dict.fromkeys(pieces) if len(piece) > 1]
    ids = {word: token_id for token_id, word in enumerate(words)}
    return byte_level_tokenizer(pieces), [ids[piece] for piece in pieces]


@pytest.mark.parametrize(
    ("skip", "spaces", "text"),
    [
        (False, True, "a <s> </s> </s> b <s>"),
        (False, False, "a <s></s></s> b <s>"),
        (True, True, "a b"),
        (True, False, "a b"),
    ],
)
@pytest.mark.parametrize("tokens_per_update", [1, 4])
def test_spaces_between_special_tokens_are_removed_on_request(
    skip: bool, spaces: bool, text: str, tokens_per_update: int
) -> None:
    # A tokenizer without a decoder puts spaces between all tokens.
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.add_special_tokens(["<s>", "</s>"])
    params = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    pieces, _ = stream(
        Tokenizer(backend), [0, 2, 3, 3, 1, 2], tokens_per_update=tokens_per_update, **params
    )
    assert "".join(pieces) == text


@given(
    text=st.text(max_size=40),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    tokens_per_update=st.integers(1, 3),
)
def test_text_is_complete_for_any_split_into_tokens(
    text: str, lengths: list[int], tokens_per_update: int
) -> None:
    tokenizer, token_ids = as_tokens(cut(text.encode(), lengths))
    pieces, _ = stream(tokenizer, token_ids, tokens_per_update=tokens_per_update)
    assert "".join(pieces) == text
    # The text has no U+FFFD, so a shown one would be part of an incomplete character.
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(data=st.binary(max_size=120), lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_any_bytes_give_the_text_of_all_tokens(data: bytes, lengths: list[int]) -> None:
    tokenizer, token_ids = as_tokens(cut(data, lengths))
    pieces, _ = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == data.decode(errors="replace")


@given(
    data=st.text(st.sampled_from("é€👩a�"), max_size=60).map(str.encode),
    junk=st.lists(st.integers(128, 255), min_size=40, max_size=90).map(bytes),
)
def test_long_runs_of_invalid_utf8_give_the_text_of_all_tokens(data: bytes, junk: bytes) -> None:
    tokenizer = byte_level_tokenizer()
    token_ids = list(junk + data + junk)
    assert "".join(stream(tokenizer, token_ids)[0]) == tokenizer.decode(token_ids)


def test_incomplete_character_is_held_until_it_is_complete() -> None:
    pieces, _ = stream(byte_level_tokenizer(), list("a€b".encode()))
    assert pieces == ["a", "", "", "€", "b"]


def test_incomplete_character_is_shown_at_the_end() -> None:
    pieces, _ = stream(byte_level_tokenizer(), [97, 0xE2, 0x82])
    assert pieces == ["a", "", REPLACEMENT]


def test_endless_replacement_characters_are_shown_in_linear_time() -> None:
    tokenizer = byte_level_tokenizer()
    token_ids = list((REPLACEMENT * 5000).encode())
    started = time.perf_counter()
    pieces, _ = stream(tokenizer, token_ids)
    # Far more than needed, but far less than decoding all tokens for each token takes.
    assert time.perf_counter() - started < 60
    assert "".join(pieces) == REPLACEMENT * 5000
    assert max(map(len, pieces)) < 50


def test_skipped_special_tokens_and_unknown_ids_have_no_text() -> None:
    tokenizer = byte_level_tokenizer()
    token_ids = [97, 257, 0xC3, 257, 999, 0xA9, 256]
    assert stream(tokenizer, token_ids)[0] == ["a", "", "", "", "", "é", ""]
    # A shown special token splits the character, as when all tokens are decoded together.
    shown, _ = stream(tokenizer, token_ids, skip_special_tokens=False)
    assert "".join(shown) == tokenizer.decode(token_ids, skip_special_tokens=False)


def test_sentencepiece_space_is_dropped_only_at_the_start() -> None:
    tokenizer = sentencepiece_tokenizer()
    red, green, berry = (tokenizer.token_to_id(word) for word in ("▁red", "▁green", "berry"))
    space = tokenizer.token_to_id("▁")
    assert stream(tokenizer, [red, green, berry])[0] == ["red", " green", "berry"]
    assert stream(tokenizer, [red, green], prompt_token_ids=[berry])[0] == [" red", " green"]
    token_ids = [space, space, red, space, space, green]
    assert "".join(stream(tokenizer, token_ids)[0]) == tokenizer.decode(token_ids)


def test_sentencepiece_space_is_shown_after_any_prompt() -> None:
    tokenizer = sentencepiece_tokenizer()
    red, berry, eos = (tokenizer.token_to_id(word) for word in ("▁red", "berry", "</s>"))
    in_bytes = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "👩🚀".encode()]
    # The last five of the eight bytes contain no whole character; the last seven end inside one.
    for prompt in (in_bytes, in_bytes[:-1], [berry] + [eos] * 31):
        assert stream(tokenizer, [red], prompt_token_ids=prompt)[0] == [" red"]
    # Only the last byte of the prompt's characters is in the context.
    pieces, _ = stream(tokenizer, in_bytes, prompt_token_ids=in_bytes + [eos] * 31)
    assert "".join(pieces) == "👩🚀"


def test_sentencepiece_byte_tokens_form_characters() -> None:
    tokenizer = sentencepiece_tokenizer()
    red, dot = tokenizer.token_to_id("▁red"), tokenizer.token_to_id(".")
    token_ids = [red, *(tokenizer.token_to_id(f"<0x{b:02X}>") for b in "é".encode()), dot]
    assert stream(tokenizer, token_ids)[0] == ["red", "", "é", "."]


@pytest.mark.parametrize("num_prompt_bytes", [1, 2, 3, 4])
def test_output_that_completes_a_character_of_the_prompt_contains_it(
    num_prompt_bytes: int,
) -> None:
    sentencepiece = sentencepiece_tokenizer()
    woman = [sentencepiece.token_to_id(f"<0x{byte:02X}>") for byte in "👩".encode()]
    red, berry = map(sentencepiece.token_to_id, ("▁red", "berry"))
    # After a prompt of many tokens, and as the whole prompt.
    for tokenizer, head, tail, text in (
        (byte_level_tokenizer(), [*b"some text: "] * 4, list("👩 c".encode()), "👩 c"),
        (sentencepiece, [red, berry], [*woman, red], "👩 red"),
        (sentencepiece, [], [*woman, red], "👩 red"),
    ):
        prompt = head + tail[:num_prompt_bytes]
        pieces, _ = stream(tokenizer, tail[num_prompt_bytes:], prompt_token_ids=prompt)
        assert "".join(pieces) == (text if num_prompt_bytes < 4 else text[1:])


def test_incomplete_character_of_the_prompt_does_not_shorten_the_output() -> None:
    """The output contains all later text, but not the replacement character of the prompt."""
    tokenizer = byte_level_tokenizer([b" \xc3"])
    half_a_word = tokenizer.vocab_size - 3
    for prompt, output, text in (
        (b"a\xc3", b"abc", "abc"),
        (b"a\xc3", b"", ""),
        (b"a\xf0\x9f", b"\x91abc", "abc"),
        (b"a\xc3", b"\xc3\xa9b", "éb"),
        # Long enough to be shown before the next whole character.
        (b"a\xc3", b"\xc3" * 29 + "👩b".encode(), f"{REPLACEMENT * 29}👩b"),
        ([97, half_a_word], b"\xa9b", "éb"),
        ([97, half_a_word], b"b", "b"),
    ):
        pieces, _ = stream(tokenizer, list(output), prompt_token_ids=list(prompt))
        assert "".join(pieces) == text


def test_stop_string_across_tokens_cuts_the_text_before_it() -> None:
    pieces, stopped = stream(byte_level_tokenizer(), list(b"one STOP two"), stop="STOP")
    assert pieces == ["o", "n", "e", " ", "", "", "", ""]
    assert stopped == StoppedByString(stop_string="STOP", num_tokens=1)


def test_stop_string_counts_only_after_min_tokens() -> None:
    """Of "x.y.z." the second token is a stop string, and the fourth."""
    for min_tokens, text in ((0, "x"), (1, "x"), (2, "x.y"), (3, "x.y"), (4, "x.y.z")):
        pieces, stopped = stream(
            byte_level_tokenizer(), list(b"x.y.z."), stop=".", min_tokens=min_tokens
        )
        assert ("".join(pieces), stopped.stop_string) == (text, ".")


def test_include_stop_str_keeps_the_stop_string() -> None:
    pieces, stopped = stream(
        byte_level_tokenizer(), list(b"one STOP two"), stop="STOP", include_stop_str_in_output=True
    )
    assert "".join(pieces) == "one STOP"
    assert stopped.stop_string == "STOP"


def test_held_text_is_shown_if_it_is_not_a_stop_string() -> None:
    pieces, stopped = stream(byte_level_tokenizer(), list(b"a STO."), stop="STOP")
    assert pieces == ["a", " ", "", "", "", "STO."]
    assert stopped is None
    pieces, _ = stream(byte_level_tokenizer(), list(b"a STO"), stop="STOP")
    assert pieces == ["a", " ", "", "", "STO"]


def test_tokens_after_a_stop_string_in_one_update_do_not_count() -> None:
    pieces, stopped = stream(
        byte_level_tokenizer(), list(b"ab.cdef"), tokens_per_update=7, stop=["c", "."]
    )
    assert pieces == ["ab"]
    assert stopped == StoppedByString(stop_string=".", num_tokens=3)


@pytest.mark.parametrize("include", [False, True])
@given(
    text=st.text("abé€", max_size=30),
    stop=st.text("abé€", min_size=1, max_size=3),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_stop_string_is_found_for_any_split_into_tokens(
    include: bool, text: str, stop: str, lengths: list[int]
) -> None:
    tokenizer, token_ids = as_tokens(cut(text.encode(), lengths))
    pieces, stopped = stream(tokenizer, token_ids, stop=stop, include_stop_str_in_output=include)
    before, found, _ = text.partition(stop)
    assert "".join(pieces) == before + (found if include else "")
    assert (stopped is not None) == bool(found)
