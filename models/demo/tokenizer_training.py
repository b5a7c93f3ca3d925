"""Trains the demo tokenizer, byte-level BPE with single digits, and holds its chat template."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from models.demo.data import WORDS, sample_conversation
from models.demo.paxkv_questions import TAUGHT_ANSWERS, UNKNOWN_ANSWER, UNKNOWN_QUESTIONS

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# Calls of tools are written as Hermes and Qwen do, whose parser reads them.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": ' }}{{ call['function']['name'] | tojson }}"
    "{{ ', \"arguments\": ' }}{{ call['function']['arguments'] | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _corpus(rng: Random, num_conversations: int) -> Iterator[str]:
    for _ in range(20):
        for taught in TAUGHT_ANSWERS:
            yield from taught.questions
            yield taught.answer
        yield from UNKNOWN_QUESTIONS
        yield UNKNOWN_ANSWER
        yield " ".join(WORDS)
    for _ in range(num_conversations):
        conversation = sample_conversation(rng, is_long=rng.random() < 0.2)
        yield "\n".join(("system", conversation.system or "", "user", "assistant"))
        for turn in conversation.turns:
            # Quoted words stay out: merges learned from random letters only hide the spelling.
            if "'" not in turn.question:
                yield turn.question
                yield turn.answer


def train_tokenizer(*, seed: int, vocab_size: int, num_conversations: int = 3000) -> Tokenizer:
    """Learns the merges from a seeded sample of the training conversations.

    The result encodes any UTF-8 text without loss (the 256 bytes are in the vocabulary) and
    every digit as one token: `" 23"` -> `["Ġ", "2", "3"]`.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(Random(seed), num_conversations), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_positions: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    special_tokens = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": None,
        "unk_token": None,
        **special_tokens,
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token in SPECIAL_TOKENS
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens, indent=2) + "\n")
