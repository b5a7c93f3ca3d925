"""Text grows token by token, shows no half characters, and ends as the decoded whole."""

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
def test_spaces_between_special_tokens_go_where_that_is_asked(
    skip: bool, spaces: bool, text: str, tokens_per_update: int
) -> None:
    # Without a decoder of its own, a tokenizer puts spaces between all tokens.
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
def test_any_cut_of_any_text_comes_back_whole(
    text: str, lengths: list[int], tokens_per_update: int
) -> None:
    tokenizer, token_ids = as_tokens(cut(text.encode(), lengths))
    pieces, _ = stream(tokenizer, token_ids, tokens_per_update=tokens_per_update)
    assert "".join(pieces) == text
    # No character of its own is U+FFFD here, so one that shows would be half of another.
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(data=st.binary(max_size=120), lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_any_bytes_come_out_as_the_decoded_whole(data: bytes, lengths: list[int]) -> None:
    tokenizer, token_ids = as_tokens(cut(data, lengths))
    pieces, _ = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == data.decode(errors="replace")


@given(
    data=st.text(st.sampled_from("é€👩a�"), max_size=60).map(str.encode),
    junk=st.lists(st.integers(128, 255), min_size=40, max_size=90).map(bytes),
)
def test_long_runs_of_bad_utf8_come_out_as_the_decoded_whole(data: bytes, junk: bytes) -> None:
    tokenizer = byte_level_tokenizer()
    token_ids = list(junk + data + junk)
    assert "".join(stream(tokenizer, token_ids)[0]) == tokenizer.decode(token_ids)


def test_half_a_character_is_held_until_its_rest_comes() -> None:
    pieces, _ = stream(byte_level_tokenizer(), list("a€b".encode()))
    assert pieces == ["a", "", "", "€", "b"]


def test_character_that_never_ends_shows_at_the_last_token() -> None:
    pieces, _ = stream(byte_level_tokenizer(), [97, 0xE2, 0x82])
    assert pieces == ["a", "", REPLACEMENT]


def test_endless_replacement_characters_are_shown_in_linear_time() -> None:
    tokenizer = byte_level_tokenizer()
    token_ids = list((REPLACEMENT * 5000).encode())
    started = time.perf_counter()
    pieces, _ = stream(tokenizer, token_ids)
    # Far above the need, far below the minutes that decoding the whole at each token takes.
    assert time.perf_counter() - started < 60
    assert "".join(pieces) == REPLACEMENT * 5000
    assert max(map(len, pieces)) < 50


def test_skipped_special_tokens_and_unknown_ids_leave_no_trace() -> None:
    tokenizer = byte_level_tokenizer()
    token_ids = [97, 257, 0xC3, 257, 999, 0xA9, 256]
    assert stream(tokenizer, token_ids)[0] == ["a", "", "", "", "", "é", ""]
    # A special token that is shown cuts the character in two, as in the decoded whole.
    shown, _ = stream(tokenizer, token_ids, skip_special_tokens=False)
    assert "".join(shown) == tokenizer.decode(token_ids, skip_special_tokens=False)


def test_sentencepiece_space_shows_only_after_something() -> None:
    tokenizer = sentencepiece_tokenizer()
    red, green, berry = (tokenizer.token_to_id(word) for word in ("▁red", "▁green", "berry"))
    space = tokenizer.token_to_id("▁")
    assert stream(tokenizer, [red, green, berry])[0] == ["red", " green", "berry"]
    assert stream(tokenizer, [red, green], prompt_token_ids=[berry])[0] == [" red", " green"]
    token_ids = [space, space, red, space, space, green]
    assert "".join(stream(tokenizer, token_ids)[0]) == tokenizer.decode(token_ids)


def test_sentencepiece_space_shows_behind_any_prompt() -> None:
    tokenizer = sentencepiece_tokenizer()
    red, berry, eos = (tokenizer.token_to_id(word) for word in ("▁red", "berry", "</s>"))
    in_bytes = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "👩🚀".encode()]
    # Of eight bytes the last five are no whole characters; the last seven end in half a one.
    for prompt in (in_bytes, in_bytes[:-1], [berry] + [eos] * 31):
        assert stream(tokenizer, [red], prompt_token_ids=prompt)[0] == [" red"]
    # Of the prompt's characters only the last byte is looked at.
    pieces, _ = stream(tokenizer, in_bytes, prompt_token_ids=in_bytes + [eos] * 31)
    assert "".join(pieces) == "👩🚀"


def test_sentencepiece_bytes_form_characters() -> None:
    tokenizer = sentencepiece_tokenizer()
    red, dot = tokenizer.token_to_id("▁red"), tokenizer.token_to_id(".")
    token_ids = [red, *(tokenizer.token_to_id(f"<0x{b:02X}>") for b in "é".encode()), dot]
    assert stream(tokenizer, token_ids)[0] == ["red", "", "é", "."]


@pytest.mark.parametrize("num_prompt_bytes", [1, 2, 3, 4])
def test_output_that_finishes_a_character_of_the_prompt_shows_it_whole(
    num_prompt_bytes: int,
) -> None:
    sentencepiece = sentencepiece_tokenizer()
    woman = [sentencepiece.token_to_id(f"<0x{byte:02X}>") for byte in "👩".encode()]
    red, berry = map(sentencepiece.token_to_id, ("▁red", "berry"))
    # Behind a prompt of many tokens, and alone.
    for tokenizer, head, tail, text in (
        (byte_level_tokenizer(), [*b"some text: "] * 4, list("👩 c".encode()), "👩 c"),
        (sentencepiece, [red, berry], [*woman, red], "👩 red"),
        (sentencepiece, [], [*woman, red], "👩 red"),
    ):
        prompt = head + tail[:num_prompt_bytes]
        pieces, _ = stream(tokenizer, tail[num_prompt_bytes:], prompt_token_ids=prompt)
        assert "".join(pieces) == (text if num_prompt_bytes < 4 else text[1:])


def test_prompt_that_ends_in_half_a_character_does_not_eat_the_output() -> None:
    """What follows is all of the output; half a character that stays one is the prompt's."""
    tokenizer = byte_level_tokenizer([b" \xc3"])
    half_a_word = tokenizer.vocab_size - 3
    for prompt, output, text in (
        (b"a\xc3", b"abc", "abc"),
        (b"a\xc3", b"", ""),
        (b"a\xf0\x9f", b"\x91abc", "abc"),
        (b"a\xc3", b"\xc3\xa9b", "éb"),
        # So long that it is shown before the next whole character.
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


def test_stop_string_counts_only_behind_min_tokens() -> None:
    """Of "x.y.z." the second token is a stop string, and the fourth."""
    for min_tokens, text in ((0, "x"), (1, "x"), (2, "x.y"), (3, "x.y"), (4, "x.y.z")):
        pieces, stopped = stream(
            byte_level_tokenizer(), list(b"x.y.z."), stop=".", min_tokens=min_tokens
        )
        assert ("".join(pieces), stopped.stop_string) == (text, ".")


def test_stop_string_is_kept_when_asked() -> None:
    pieces, stopped = stream(
        byte_level_tokenizer(), list(b"one STOP two"), stop="STOP", include_stop_str_in_output=True
    )
    assert "".join(pieces) == "one STOP"
    assert stopped.stop_string == "STOP"


def test_text_that_did_not_become_a_stop_string_is_shown_after_all() -> None:
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
def test_stop_string_is_found_in_any_cut(
    include: bool, text: str, stop: str, lengths: list[int]
) -> None:
    tokenizer, token_ids = as_tokens(cut(text.encode(), lengths))
    pieces, stopped = stream(tokenizer, token_ids, stop=stop, include_stop_str_in_output=include)
    before, found, _ = text.partition(stop)
    assert "".join(pieces) == before + (found if include else "")
    assert (stopped is not None) == bool(found)
