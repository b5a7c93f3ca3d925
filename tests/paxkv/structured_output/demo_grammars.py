"""The demo model's tokenizer, and compilers for it."""

import numpy as np

from paxkv.contracts.grammar_bitmask import GrammarBitmask
from paxkv.structured_output.grammar_compiler import GrammarCompiler
from paxkv.text.tokenizer import Tokenizer
from tests.end_to_end.real_server import ROOT

EOS = 2
VOCAB_SIZE = 800  # more than the tokenizer has, as many models do
TOKENIZER = Tokenizer.from_folder(ROOT / "models" / "demo" / "checkpoint")
SETUP = {"tokenizer_json": TOKENIZER.json, "vocab_size": VOCAB_SIZE, "eos_token_ids": [EOS]}


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(**SETUP)


def allowed_ids(bitmask: GrammarBitmask, row: int = 0) -> list[int]:
    bits = np.unpackbits(bitmask.bitmask_np[row].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()
