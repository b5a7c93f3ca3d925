"""Tokenizers made from Mistral's own files give the tokens that mistral-common gives."""

import base64
import importlib
import json
import shutil
from pathlib import Path

import pytest

from models.errors import CheckpointError, ModelError, UnsupportedModelError
from models.loading.mistral_tokenizer import find_mistral_tokenizer, write_mistral_tokenizer
from paxkv.text.chat_template import ChatTemplate
from paxkv.text.tokenizer import Tokenizer

# As the tekken.json files of Mistral's models have it.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The second token of "the", "he", has a lower rank than the first, "th".
MERGED = [
    "he",
    "th",
    "the",
    " t",
    " the",
    "in",
    " c",
    "at",
    " cat",
    "ing",
    "ß",
    "aa",
    "aaa",
    "\n\n",
]
# The order of mistral-common for files without a list, and its tokens of later versions.
SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]"),
]
NUM_SPECIAL = 30
TEXTS = [
    "the cat, thing aaaa aaaaa!\n\n\tNext  line. ",
    "Größe und Straße, ÉCOLE, 東京 タワー 12345, emoji 🙂 and e\u0301.",
    "def f(x):\n    return x + 1  // comment\r\n",
    "",
    " ",
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "cats", "arguments": '{"in": "the city"}'},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "cats",
        "description": "Counts cats.",
        "parameters": {"type": "object", "properties": {"in": {"type": "string"}}},
    },
}
CHATS = {
    "user": ([{"role": "user", "content": "the cat"}], None),
    "system and turns": (
        [
            {"role": "system", "content": "be nice"},
            {"role": "user", "content": "the cat"},
            {"role": "assistant", "content": "is here"},
            {"role": "user", "content": "and?"},
        ],
        None,
    ),
    "tools": (
        [
            {"role": "user", "content": "how many cats?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "12", "tool_call_id": "abcdefghi", "name": "cats"},
        ],
        [TOOL],
    ),
}


def write_tekken(path, *, version="v13", tokens=None, special=SPECIAL, **config):
    """Writes a tekken.json with one token for each byte and a few merged ones."""
    tokens = tokens or [bytes([byte]) for byte in range(256)] + [t.encode() for t in MERGED]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": version,
            **config,
        },
        "vocab": vocab,
    }
    if special is not None:
        content["special_tokens"] = [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ]
    path.write_text(json.dumps(content))
    return path


def read_with_library(path):
    pytest.importorskip("mistral_common", reason="needs the extra `mistral`")
    return importlib.import_module(
        "mistral_common.tokens.tokenizers.mistral"
    ).MistralTokenizer.from_file(str(path))


@pytest.mark.parametrize(("version", "special"), [("v3", None), ("v13", SPECIAL)])
def test_texts_have_the_tokens_of_the_library(tmp_path, version, special):
    path = write_tekken(tmp_path / "tekken.json", version=version, special=special)
    theirs = read_with_library(path).instruct_tokenizer.tokenizer
    folder = write_mistral_tokenizer(path, tmp_path / "cache")
    ours = Tokenizer.from_folder(folder)
    assert ours.vocab_size == theirs.n_words == NUM_SPECIAL + 256 + len(MERGED)
    for text in TEXTS:
        ids = theirs.encode(text, bos=True, eos=False)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids) == text
    assert any(token_id >= NUM_SPECIAL + 256 for token_id in ours.encode(TEXTS[0]))
    for token_id in range(NUM_SPECIAL + 128):
        assert ours.token_text(token_id) == theirs.id_to_piece(token_id)
    assert write_mistral_tokenizer(path, tmp_path / "cache") == folder


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(("version", "special"), [("v3", None), ("v7", SPECIAL), ("v13", SPECIAL)])
def test_chats_have_the_tokens_of_the_library(tmp_path, version, special, chat):
    path = write_tekken(tmp_path / "tekken.json", version=version, special=special)
    library, (messages, tools) = read_with_library(path), CHATS[chat]
    request = importlib.import_module("mistral_common.protocol.instruct.request")
    wanted = library.encode_chat_completion(
        request.ChatCompletionRequest.from_openai(messages, tools=tools)
    ).tokens
    folder = write_mistral_tokenizer(path, tmp_path / "cache")
    ours = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, special_tokens=ours.special_tokens)
    rendered = template.render(messages, tools=tools)
    assert ours.encode(rendered, add_special_tokens=False) == wanted, rendered


def test_a_file_that_the_library_refuses_is_named(tmp_path):
    pytest.importorskip("mistral_common", reason="needs the extra `mistral`")
    path = write_tekken(tmp_path / "tekken.json", version="v99")
    with pytest.raises(CheckpointError, match=r"tekken.json cannot be read by mistral-common.*v99"):
        write_mistral_tokenizer(path, None)


def test_a_special_token_with_the_text_of_another_token_is_refused(tmp_path):
    pytest.importorskip("mistral_common", reason="needs the extra `mistral`")
    tokens = [bytes([byte]) for byte in range(256)] + [b"[INST]"]
    path = write_tekken(tmp_path / "tekken.json", tokens=tokens)
    with pytest.raises(UnsupportedModelError, match="has the text of another token"):
        write_mistral_tokenizer(path, None)


def test_without_the_library_the_error_names_the_extra(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModelError, match=r"tekken.json needs .*pip install 'paxkv\[mistral\]'"):
        write_mistral_tokenizer(write_tekken(tmp_path / "tekken.json"), None)


def published(version):
    """A SentencePiece model that the library contains."""
    library = pytest.importorskip("mistral_common", reason="needs the extra `mistral`")
    pytest.importorskip("sentencepiece", reason="needs the extra `mistral`")
    return next(Path(library.__file__).parent.glob(f"data/*.model.{version}"))


# In the normal run, `test_chats_have_the_tokens_of_the_library` has chats of v3, from tekken.json.
@pytest.mark.parametrize("version", ["v1", pytest.param("v3", marks=pytest.mark.slow), "v7"])
def test_sentencepiece_models_give_the_tokens_of_the_library(tmp_path, version):
    path = tmp_path / f"tokenizer.model.{version}"
    shutil.copy(published(version), path)
    library = read_with_library(path)
    theirs = library.instruct_tokenizer.tokenizer
    folder = write_mistral_tokenizer(path, tmp_path / "cache")
    ours = Tokenizer.from_folder(folder)
    assert ours.vocab_size == theirs.n_words
    for text in [*TEXTS, "  two  spaces", "\u2581x", "\n a", "a\0b"]:
        ids = theirs.encode(text, bos=True, eos=False)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text
    template = ChatTemplate.from_folder(folder, special_tokens=ours.special_tokens)
    request = importlib.import_module("mistral_common.protocol.instruct.request")
    for name, (messages, tools) in CHATS.items():
        # The first version has no tools.
        if tools is None or version != "v1":
            wanted = library.encode_chat_completion(
                request.ChatCompletionRequest.from_openai(messages, tools=tools)
            ).tokens
            rendered = template.render(messages, tools=tools)
            assert ours.encode(rendered, add_special_tokens=False) == wanted, (name, rendered)


def test_a_sentencepiece_model_that_changes_texts_is_refused(tmp_path):
    published("v3")
    sentencepiece = importlib.import_module("sentencepiece")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:3]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts.txt"),
        model_prefix=str(tmp_path / "small"),
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="nfkc",
        minloglevel=2,
    )
    path = (tmp_path / "small.model").rename(tmp_path / "tokenizer.model.v1")
    with pytest.raises(UnsupportedModelError, match="of another kind than Mistral's: it"):
        write_mistral_tokenizer(path, None)


def test_the_newest_tokenizer_is_chosen(tmp_path):
    assert find_mistral_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").touch()
    assert find_mistral_tokenizer(tmp_path) is None
    (tmp_path / "params.json").touch()
    assert find_mistral_tokenizer(tmp_path) == tmp_path / "tokenizer.model"
    for name in ("tokenizer.model.v3", "tokenizer.model.v11", "tokenizer.model.v7m1"):
        (tmp_path / name).touch()
    assert find_mistral_tokenizer(tmp_path) == tmp_path / "tokenizer.model.v11"
    (tmp_path / "tekken.json").touch()
    assert find_mistral_tokenizer(tmp_path) == tmp_path / "tekken.json"
