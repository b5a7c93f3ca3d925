"""The tokenizer reads a checkpoint's files as transformers does."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, processors

from paxkv.errors import ConfigError, InvalidRequestError
from paxkv.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from tests.paxkv.text.small_tokenizers import (
    BOS,
    EOS,
    byte_level_backend,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)

BOS_ID, EOS_ID = 256, 257


def save(folder: Path, config: dict, special_tokens_map: dict | None = None) -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if special_tokens_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))


def test_encode_and_decode_are_inverses_on_any_unicode() -> None:
    tokenizer = byte_level_tokenizer()
    text = "naïve 日本 👩‍🚀 \x00\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_texts_are_encoded_like_short_ones(tmp_path: Path) -> None:
    save(tmp_path, {"bos_token": BOS})
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "é a" * LONG_TEXT_CHARS
    assert tokenizer.encode(text) == [BOS_ID, *text.encode()]
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())


def test_post_processor_of_tokenizer_json_adds_bos_and_truncation_is_off(tmp_path: Path) -> None:
    save(tmp_path, {"bos_token": BOS, "eos_token": {"content": EOS, "lstrip": False}})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("abcdefg") == [BOS_ID, *b"abcdefg"]
    assert tokenizer.encode("ab", add_special_tokens=False) == [97, 98]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"add_bos_token": False}, [97]),
        ({"add_bos_token": True}, [BOS_ID, 97]),
        ({"add_bos_token": True, "add_eos_token": True}, [BOS_ID, 97, EOS_ID]),
        ({"add_eos_token": True}, [97, EOS_ID]),
        ({"add_bos_token": None}, [BOS_ID, 97]),
    ],
)
def test_flags_of_tokenizer_config_replace_the_post_processor(
    tmp_path: Path, flags: dict, expected: list[int]
) -> None:
    save(tmp_path, {"bos_token": BOS, "eos_token": EOS, **flags})
    assert Tokenizer.from_folder(tmp_path).encode("a") == expected


def test_special_tokens_map_of_older_checkpoints_is_read(tmp_path: Path) -> None:
    save(tmp_path, {}, special_tokens_map={"eos_token": EOS})
    assert Tokenizer.from_folder(tmp_path).eos_token_id == EOS_ID


def test_special_tokens_are_skipped_only_on_request() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.special_token_ids == {BOS_ID, EOS_ID}
    assert tokenizer.decode([BOS_ID, 97, EOS_ID]) == "a"
    assert tokenizer.decode([BOS_ID, 97, EOS_ID], skip_special_tokens=False) == f"{BOS}a{EOS}"
    assert not tokenizer.has_text(EOS_ID, skip_special_tokens=True)
    assert tokenizer.has_text(EOS_ID, skip_special_tokens=False)


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.vocab_size == 258
    assert not tokenizer.has_text(999, skip_special_tokens=False)
    assert tokenizer.decode([97, 999, 98]) == "ab"
    assert tokenizer.token_text(999) == ""


def test_text_of_a_token_has_the_space_before_its_word() -> None:
    tokenizer = sentencepiece_tokenizer()
    words = ("▁red", "berry", "▁", "<0x41>", BOS)
    token_ids = [tokenizer.token_to_id(word) for word in words]
    assert [*map(tokenizer.token_text, token_ids)] == [" red", "berry", " ", "A", BOS]


def test_named_token_of_the_vocabulary_becomes_special() -> None:
    tokenizer = Tokenizer(byte_level_backend([b"<end>"]), {"eos_token": "<end>"})
    assert tokenizer.eos_token_id in tokenizer.special_token_ids
    assert tokenizer.decode([97, tokenizer.eos_token_id]) == "a"


def test_named_added_token_becomes_special() -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<end>", lstrip=True)])
    tokenizer = Tokenizer(backend, {"eos_token": "<end>"})
    assert tokenizer.encode("a <end>") == [97, tokenizer.eos_token_id]
    assert tokenizer.decode([97, tokenizer.eos_token_id]) == "a"


SPECIAL_WORDS = {
    "named": {"mask_token": "<tool>"},
    "named by the checkpoint": {"tool_token": "<tool>"},
    "with flags": {"eos_token": {"__type": "AddedToken", "content": "<tool>", "lstrip": True}},
    "additional": {"additional_special_tokens": ["<tool>"]},
    "extra": {"extra_special_tokens": ["<tool>"], "additional_special_tokens": ["<s>"]},
    "extra by name": {"extra_special_tokens": {"tool_token": "<tool>"}},
    "additional beside named extra": {
        "extra_special_tokens": {"cls_token": "<s>"},
        "additional_special_tokens": ["<tool>"],
    },
}


@pytest.mark.parametrize("config", SPECIAL_WORDS.values(), ids=SPECIAL_WORDS)
def test_special_tokens_of_the_vocabulary_have_one_id_each(config: dict) -> None:
    tokenizer = Tokenizer(byte_level_backend([b"<tool>"]), config)
    tool_id = tokenizer.token_to_id("<tool>")
    is_stripped = "eos_token" in config
    assert tokenizer.encode("a <tool>b") == [97, *b" "[is_stripped:], tool_id, 98]
    assert tokenizer.decode([97, tool_id, 98]) == "ab"


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("config", SPECIAL_WORDS.values(), ids=SPECIAL_WORDS)
def test_special_tokens_are_those_of_transformers(
    tmp_path: Path, config: dict, is_added: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    backend = byte_level_backend([] if is_added else [b"<tool>"])
    backend.add_tokens(["<tool>"] if is_added else [])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    ours = Tokenizer.from_folder(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    token_ids = ours.encode("a <tool> b<s>")
    assert token_ids == theirs.encode("a <tool> b<s>", add_special_tokens=False)
    assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)


def test_every_named_token_is_a_variable_of_chat_templates() -> None:
    config = {
        "mask_token": "<m>",
        "image_token": {"content": "<i>"},
        "extra_special_tokens": {"call_token": "<c>"},
        "pad_token": None,
        "add_bos_token": False,
    }
    named = {"mask_token": "<m>", "image_token": "<i>", "call_token": "<c>"}
    assert Tokenizer(byte_level_backend(), config).special_tokens == named


def test_tokenizer_config_takes_precedence_over_tokenizer_json() -> None:
    backend = byte_level_backend([b"<word>"])
    backend.add_tokens(["<tool>"])
    word_id, tool_id = map(backend.token_to_id, ("<word>", "<tool>"))
    added = {
        str(word_id): {"content": "<word>", "special": False},
        str(tool_id): {"content": "<tool>", "special": True, "lstrip": True},
    }
    tokenizer = Tokenizer(backend, {"added_tokens_decoder": added})
    assert tokenizer.encode("<word> <tool>") == [word_id, tool_id]
    assert tokenizer.decode([97, tool_id]) == "a"


def test_tokens_only_in_tokenizer_config_are_added_with_their_id() -> None:
    added = {"258": {"content": "<tool>", "special": False, "lstrip": False}}
    tokenizer = Tokenizer(byte_level_backend(), {"added_tokens_decoder": added})
    assert tokenizer.encode("<tool>") == [258]
    # The order of the ids decides the order of the tokens.
    many = {str(token_id): {"content": f"<{token_id}>"} for token_id in (260, 258, 259)}
    tokenizer = Tokenizer(byte_level_backend(), {"added_tokens_decoder": many})
    assert tokenizer.encode("<258><259><260>") == [258, 259, 260]
    added = {"300": {"content": "<tool>", "special": False}}
    with pytest.raises(ConfigError, match="258"):
        Tokenizer(byte_level_backend(), {"added_tokens_decoder": added})


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_mark_is_ignored(tmp_path: Path, name: str, encoding: str) -> None:
    save(tmp_path, {"bos_token": "a", "eos_token": "b"})
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "c"}')
    path = tmp_path / name
    path.write_text(path.read_text(encoding="utf-8"), encoding=encoding)
    tokenizer = Tokenizer.from_folder(tmp_path)
    expected = {"bos_token": "a", "eos_token": "b", "pad_token": "c"}
    assert tokenizer.special_tokens.items() >= expected.items()
    assert tokenizer.decode(tokenizer.encode("Größe")) == "Größe"


def test_error_names_a_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a Git LFS pointer.*git lfs pull"):
        Tokenizer.from_folder(tmp_path)


def test_missing_and_broken_files_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
    save(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}")
    with pytest.raises(ConfigError, match="recursion"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "added",
    [{"7": "<tool>"}, {"x": {"content": "<tool>"}}, {"7": {"content": 5}}, {"7": {}}, ["<tool>"]],
    ids=repr,
)
def test_malformed_added_tokens_are_a_config_error(added: object) -> None:
    with pytest.raises(ConfigError, match="added_tokens_decoder .* such as"):
        Tokenizer(byte_level_backend(), {"added_tokens_decoder": added})


def test_eos_token_without_an_id_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="<nowhere>"):
        Tokenizer(byte_level_backend(), {"eos_token": "<nowhere>"})


def test_lone_surrogate_is_an_invalid_request_error() -> None:
    with pytest.raises(InvalidRequestError, match="character 1"):
        byte_level_tokenizer().encode("a\ud800")


def test_ids_without_a_token_in_a_padded_vocabulary_are_found():
    tokenizer = byte_level_tokenizer([b"ab"])
    assert tokenizer.vocab_size == 259
    assert tokenizer.ids_without_token(261) == [259, 260]
    assert tokenizer.ids_without_token(256) == []
