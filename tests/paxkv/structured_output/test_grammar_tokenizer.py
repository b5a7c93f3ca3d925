"""A settled text is spelled by the model's own tokens, and in every tokenizer it can be drawn."""

import json

import llguidance
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.structured_output.grammar_compiler import GrammarCompiler
from paxkv.structured_output.grammar_tokenizer import make_grammar_tokenizer
from tests.paxkv.structured_output.demo_grammars import EOS, TOKENIZER
from tests.paxkv.text.small_tokenizers import byte_level_backend, sentencepiece_tokenizer


def _demo_backend(*, normalizer=None, pre_tokenizer=None):
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.json)
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return backend


def _sentencepiece_backend():
    backend = tokenizers.Tokenizer.from_str(sentencepiece_tokenizer().json)
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.add_tokens([AddedToken(" <", normalized=False)])
    return backend


BACKENDS = {
    "byte-level": _demo_backend(),
    "normal forms": _demo_backend(normalizer=normalizers.NFC()),
    "small letters": _demo_backend(normalizer=normalizers.Lowercase()),
    "a space in front": _demo_backend(
        normalizer=normalizers.Sequence([]),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
    ),
    "SentencePiece": _sentencepiece_backend(),
    "Metaspace": _sentencepiece_backend(),
}
BACKENDS["Metaspace"].normalizer = None
BACKENDS["Metaspace"].pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
TEXTS = [
    "<tool_call>",
    "a text, and then <|im_end|>, <s> and </s>",
    "Cafe\u0301 \u212b",
    " red <s>berry\n\n<0x41>",
    "<[5]>\x7f\x00",
]


def _spelled(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """What is drawn for this text, one token after the other."""
    num_tokens = backend.get_vocab_size()
    compiler = GrammarCompiler(backend.to_str(), vocab_size=num_tokens, eos_token_ids=[EOS])
    matcher = compiler.compile(StructuredOutputsParams(choice=[text]))
    token_ids: list[int] = []
    while True:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        token_id = int(np.flatnonzero(np.unpackbits(bits, bitorder="little"))[0])
        assert matcher.consume_token(token_id), matcher.get_error()
        if token_id == EOS:
            return token_ids
        token_ids.append(token_id)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_literal_text_is_drawn_without_special_tokens(name, text):
    backend = BACKENDS[name]
    token_ids = _spelled(backend, text)
    drawn = backend.decoder.decode(["x", *map(backend.id_to_token, token_ids)])
    assert drawn == f"x{text}"
    added = backend.get_added_tokens_decoder()
    assert not any(added[i].special for i in token_ids if i in added)


def test_an_added_token_that_is_not_special_is_text():
    backend = BACKENDS["byte-level"]
    begin, end = (backend.token_to_id(text) for text in ("<tool_call>", "</tool_call>"))
    assert _spelled(backend, "<tool_call>a</tool_call>") == [begin, *backend.encode("a").ids, end]


def test_the_name_of_a_special_token_leaves_the_rest_as_the_tokenizer_spells_it():
    backend = BACKENDS["byte-level"]
    texts = ("Hello there", " another thing")
    before, after = (backend.encode(text).ids for text in texts)
    # Longest tokens first, which is llguidance's own way, would be others.
    greedy = llguidance.LLTokenizer(backend.to_str(), slices=[]).greedy_tokenize
    assert before != greedy(texts[0]) and after != greedy(texts[1])
    token_ids = _spelled(backend, "<|im_end|>".join(texts))
    assert token_ids[: len(before)] == before and token_ids[-len(after) :] == after


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a space in front", ["the", "Ġthe", "Ġmodel"]),
        ("SentencePiece", ["<0x62>", " <", "s", "▁"]),
        ("Metaspace", ["<0x62>", " <", "s", "▁"]),
    ],
)
def test_a_text_after_another_is_spelled_without_a_leading_space(name, words):
    backend = BACKENDS[name]
    text = backend.decoder.decode(["x", *words])[1:]
    assert [backend.id_to_token(i) for i in _spelled(backend, text)] == words


def test_tokens_without_bytes_are_refused():
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.json)
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ValueError, match="decoder"):
        make_grammar_tokenizer(backend.to_str(), vocab_size=800, eos_token_ids=[EOS])


def test_every_end_token_is_allowed_after_a_complete_text():
    tokenizer = make_grammar_tokenizer(TOKENIZER.json, vocab_size=800, eos_token_ids=[EOS, 0])
    assert sorted(tokenizer.eos_tokens) == [0, EOS] and tokenizer.vocab_size == 800
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("choice", '["a"]'))
    assert matcher.consume_tokens(TOKENIZER.encode("a"))
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist() == [0, EOS]


def _bpe_backend():
    """Bytes, then "ab" and "abc", made by merges; the last id is an added token."""
    backend = byte_level_backend([b"ab", b"abc"])
    content = json.loads(backend.to_str())
    content["model"]["merges"] = [["a", "b"], ["ab", "c"]]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _unigram_backend():
    pieces = ["<unk>", "</s>", *"abc", "▁", "ab", "abc"]
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["</s>", "<image>"])
    return backend


@pytest.mark.parametrize("num_missing", [1, 2, 3])
@pytest.mark.parametrize("make_backend", [_demo_backend, _bpe_backend, _unigram_backend])
def test_tokens_past_the_models_vocabulary_are_left_out(make_backend, num_missing):
    backend = make_backend()
    vocab_size = backend.get_vocab_size() - num_missing
    eos_id = 1 if make_backend is _unigram_backend else EOS
    compiler = GrammarCompiler(backend.to_str(), vocab_size=vocab_size, eos_token_ids=[eos_id])
    matcher = compiler.compile(StructuredOutputsParams(regex="[abc]{3}"))
    token_ids = []
    while eos_id not in token_ids:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        assert allowed.size and allowed.max() < vocab_size
        token_ids.append(int(allowed[-1]))  # the longest text, in these vocabularies
        assert matcher.consume_token(token_ids[-1])
    assert len(compiler.token_texts().by_id) == vocab_size
