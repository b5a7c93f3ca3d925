"""The tokenizer of a GGUF file gives the tokens of the tokenizer that it was made from."""

import json
import re

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from models.loading.gguf.gguf_tokenizer import write_tokenizer_of
from paxkv.text.chat_template import ChatTemplate
from paxkv.text.tokenizer import Tokenizer
from tests.models.loading.gguf.write_gguf import write_gguf

CORPUS = [
    "It's the cat's 12345 mats, they'll say; we're  done!\n\n\tNext line. ",
    "Größe und Straße, naïve café, 東京 タワー, emoji 🙂 and e\u0301.",
    "def f(x):\n    return x + 1  # comment\r\n",
]
TEXTS = [*CORPUS, "", " ", "\n", "unseen wörd 999 🙃", "a<|end|>b <|end|>", "  two  spaces "]
SPECIAL = ["<|begin|>", "<|end|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
# As the tokenizer.json files of these models have them.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"qwen2": QWEN_PATTERN, "llama-bpe": QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)}


def byte_level(pre: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pre]), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """A tokenizer as Llama 2 has it: merges, bytes for unknown characters, and a leading space."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", *byte_tokens], show_progress=False
    )
    backend.train_from_iterator(["the cat sat on the mat. " * 4, "then they sat there "], trainer)
    # In training they were special; in the models they are plain tokens.
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][:1]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def metadata_of(backend: tokenizers.Tokenizer, **fields: object) -> dict[str, object]:
    """What llama.cpp's converter writes for a tokenizer, with two special tokens at the end."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ranks = {"".join(merge.split(" ")): rank for rank, merge in reversed([*enumerate(merges)])}
    return {
        "tokenizer.ggml.tokens": [*tokens, *SPECIAL],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.scores": [-float(ranks.get(t, 1e6)) for t in [*tokens, *SPECIAL]],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        "tokenizer.chat_template": TEMPLATE,
    } | {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def write(folder, metadata):
    path = write_gguf(folder / "model.gguf", metadata, {})
    return write_tokenizer_of(path, folder / "cache")


@pytest.mark.parametrize("pre", PATTERNS)
def test_a_byte_level_tokenizer_gives_the_same_tokens(tmp_path, pre):
    backend = byte_level(pre)
    folder = write(tmp_path, metadata_of(backend, model="gpt2", pre=pre, add_bos_token=0))
    backend.add_special_tokens(SPECIAL)
    ours = Tokenizer.from_folder(folder)
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == backend.decode(ids), text
    assert write_tokenizer_of(tmp_path / "model.gguf", tmp_path / "cache") == folder


def test_a_sentencepiece_tokenizer_gives_the_same_tokens(tmp_path):
    backend = sentencepiece()
    folder = write(tmp_path, metadata_of(backend, model="llama", unknown_token_id=0))
    backend.add_special_tokens(SPECIAL)
    ours = Tokenizer.from_folder(folder)
    for text in ("the cat", "they sat then", "über the mat 🙂", "on<|end|>", "  the  mat "):
        ids = backend.encode(text).ids
        assert ours.encode(text) == [ours.bos_token_id, *ids], text
        assert ours.decode(ids) == backend.decode(ids), text


def test_bos_and_the_chat_template_are_those_of_the_file(tmp_path):
    metadata = metadata_of(byte_level("llama-bpe"), model="gpt2", pre="llama-bpe")
    folder = write(tmp_path, metadata)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("cat")[0] == tokenizer.bos_token_id
    template = ChatTemplate.from_folder(folder, special_tokens=tokenizer.special_tokens)
    assert template.render([{"role": "user", "content": "Hi"}]) == "<|begin|>Hi<|end|>"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "gpt2", "pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; paxkv reads 'gpt2' and 'llama'"),
        ({"model": "gpt2", "pre": "qwen2", "merges": 1}, "has no tokenizer.ggml.merges"),
        ({"model": "llama", "tokens": 1, "token_type": 1}, "has no tokenizer.ggml.tokens"),
        ({"model": "gpt2", "pre": "qwen2", "merges": ["y z"]}, "contradict.*Token `yz` out of"),
        ({"model": "gpt2", "pre": "qwen2", "bos_token_id": 9999}, "contradict.*IndexError"),
        ({"model": "llama", "scores": [0.0]}, "contradict.*IndexError"),
    ],
)
def test_another_tokenizer_is_not_read_and_the_log_says_why(tmp_path, caplog, fields, reason):
    assert write(tmp_path, metadata_of(byte_level("qwen2"), **fields)) is None
    assert re.search(reason, caplog.text)
