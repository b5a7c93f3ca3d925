"""The demo model's tokenizer, and compilers for it."""

import numpy as np
import tokenizers

from paxkv.contracts.executor import GrammarBitmask
from paxkv.structured_output.grammar_compiler import GrammarCompiler
from paxkv.text.reasoning_parser import thought_token_ids
from paxkv.text.tokenizer import Tokenizer
from tests.end_to_end.real_server import ROOT

EOS = 2
VOCAB_SIZE = 800  # more than the tokenizer has, as many models do
TOKENIZER = Tokenizer.from_folder(ROOT / "models" / "demo" / "checkpoint")
SETUP = {"tokenizer_json": TOKENIZER.json, "vocab_size": VOCAB_SIZE, "eos_token_ids": [EOS]}


def _with_thoughts() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.json)
    backend.add_tokens(["<think>", "</think>"])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})


# The same, with two tokens more, as a model that thinks has them.
THINKER = _with_thoughts()
# The model has more rows than the tokenizer has tokens. No text has the byte 0xFF.
WITH_TEXT = {i for i in range(THINKER.vocab_size) if THINKER.token_bytes(i) != b"\xff"}
OPEN, CLOSE = thought_token_ids(THINKER, VOCAB_SIZE)


def make_compiler(*, thinks: bool = False) -> GrammarCompiler:
    if not thinks:
        return GrammarCompiler(**SETUP)
    setup = SETUP | {"tokenizer_json": THINKER.json, "thought_token_ids": (OPEN, CLOSE)}
    return GrammarCompiler(**setup)


def allowed_ids(bitmask: GrammarBitmask, row: int = 0) -> list[int]:
    bits = np.unpackbits(bitmask.bitmask_np[row].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()
