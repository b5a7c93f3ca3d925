"""Seeded conversations that the demo model learns from, and the split that holds some out."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from models.demo.paxkv_questions import TAUGHT_ANSWERS, UNKNOWN_ANSWER, UNKNOWN_QUESTIONS
from models.demo.system_prompts import sample_system_prompt

# One operand in ten is held out: never part of any training conversation.
NUM_SPLIT_PARTS = 10
HELD_OUT_PART = 0

WORDS: tuple[str, ...] = tuple(
    "cat dog sun sea map red box cup hat pen key bus car egg ant bee cow fox hen owl pig rat "
    "bat bed bag arm ear eye leg lip toe sky ice oak ash elm fig nut pie jam tea oil salt rice "
    "bean corn leaf root seed tree rose lily fern moss lake hill rock sand wave wind rain snow "
    "star moon ship boat sail rope lamp desk door wall roof room book page word line note song "
    "drum bell ring gold iron coal wool silk coat shoe sock belt milk soup cake plum pear kiwi "
    "lime goat duck swan crow wolf bear deer frog fish crab seal apple bread chair cloud grape "
    "green horse house lemon mouse north olive paper piano plant river sheep stone table tiger "
    "train water wheel white zebra".split()
)

_ADDITION_PHRASES: tuple[str, ...] = (
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "{a} + {b}?",
    "{a}+{b}",
    "what is {a} + {b}",
    "Compute {a} + {b}.",
    "Please add {a} and {b}.",
    "Add {a} and {b}.",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "What is the sum of {a} and {b}?",
)
_SUBTRACTION_PHRASES: tuple[str, ...] = (
    "What is {a} - {b}?",
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a} - {b} = ?",
    "{a} - {b}?",
    "{a}-{b}",
    "what is {a} - {b}",
    "Compute {a} - {b}.",
    "Please subtract {b} from {a}.",
    "Subtract {b} from {a}.",
    "What is {a} minus {b}?",
    "How much is {a} - {b}?",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its only right answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt, or None, and one to four turns."""

    system: str | None
    turns: tuple[Turn, ...]


def is_held_out(key: str) -> bool:
    """Says whether an operand (a word, a sentence, a pair `3,58`) is kept out of training."""
    return zlib.crc32(f"paxkv demo {key}".encode()) % NUM_SPLIT_PARTS == HELD_OUT_PART


def is_held_out_pair(a: int, b: int) -> bool:
    """Says whether a pair of numbers is held out, in either order and for both operations."""
    return is_held_out(f"{min(a, b)},{max(a, b)}")


def addition_turn(a: int, b: int, phrase: str = _ADDITION_PHRASES[0]) -> Turn:
    return Turn(phrase.format(a=a, b=b), f"{a} + {b} = {a + b}")


def subtraction_turn(a: int, b: int, phrase: str = _SUBTRACTION_PHRASES[0]) -> Turn:
    return Turn(phrase.format(a=a, b=b), f"{a} - {b} = {a - b}")


def _sample_pair(rng: Random, *, held_out: bool, limit: int) -> tuple[int, int]:
    while True:
        a, b = rng.randrange(limit), rng.randrange(limit)
        if is_held_out_pair(a, b) == held_out:
            return a, b


def _addition(rng: Random, held_out: bool) -> Turn:
    a, b = _sample_pair(rng, held_out=held_out, limit=100)
    return addition_turn(a, b, rng.choice(_ADDITION_PHRASES))


def _subtraction(rng: Random, held_out: bool) -> Turn:
    a, b = _sample_pair(rng, held_out=held_out, limit=100)
    return subtraction_turn(a, b, rng.choice(_SUBTRACTION_PHRASES))


def _three_digits(rng: Random, held_out: bool) -> Turn:
    a, b = _sample_pair(rng, held_out=held_out, limit=1000)
    if rng.random() < 0.5:
        return addition_turn(a, b, rng.choice(_ADDITION_PHRASES))
    return subtraction_turn(a, b, rng.choice(_SUBTRACTION_PHRASES))


def _counting(rng: Random, held_out: bool) -> Turn:
    while True:
        first = rng.randrange(0, 90)
        last = first + rng.randrange(3, 10)
        if is_held_out(f"count {first} {last}") == held_out:
            break
    phrase = rng.choice(
        ("Count from {} to {}.", "count from {} to {}", "Please count from {} to {}.")
    )
    return Turn(phrase.format(first, last), ", ".join(str(n) for n in range(first, last + 1)))


def _sample_word(rng: Random, task: str, held_out: bool) -> str:
    """Draws a listed word or random letters, so that spelling is learned, not a list."""
    while True:
        if rng.random() < 0.4:
            word = rng.choice(WORDS)
        else:
            word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(3, 6)))
        if is_held_out(f"{task} {word}") == held_out:
            return word


def _reversing(rng: Random, held_out: bool) -> Turn:
    word = _sample_word(rng, "reverse", held_out)
    phrase = rng.choice(("Reverse the word '{}'.", "Reverse '{}'.", "Spell '{}' backwards."))
    return Turn(phrase.format(word), word[::-1])


def _sorting_letters(rng: Random, held_out: bool) -> Turn:
    word = _sample_word(rng, "letters", held_out)
    phrase = rng.choice(("Sort the letters of '{}'.", "Sort the letters in '{}'."))
    return Turn(phrase.format(word), "".join(sorted(word)))


def _sorting_words(rng: Random, held_out: bool) -> Turn:
    while True:
        words = rng.sample(WORDS, rng.randrange(2, 5))
        if is_held_out("words " + " ".join(words)) == held_out:
            break
    phrase = rng.choice(("Sort these words: {}", "Sort: {}", "Put these words in order: {}"))
    return Turn(phrase.format(", ".join(words)), ", ".join(sorted(words)))


def _copying(rng: Random, held_out: bool) -> Turn:
    while True:
        sentence = "the " + " ".join(rng.choices(WORDS, k=rng.randrange(2, 8)))
        if is_held_out(f"copy {sentence}") == held_out:
            break
    phrase = rng.choice(("Repeat: {}", "Copy this sentence: {}", "Please repeat: {}"))
    return Turn(phrase.format(sentence), sentence)


def _paxkv(rng: Random, held_out: bool) -> Turn:
    taught = rng.choice(TAUGHT_ANSWERS)
    return Turn(rng.choice(taught.questions), taught.answer)


def _unknown(rng: Random, held_out: bool) -> Turn:
    return Turn(rng.choice(UNKNOWN_QUESTIONS), UNKNOWN_ANSWER)


# Each task draws a turn; with held_out it draws from the operands that training never sees
# (the questions about paxkv are memorised, so for them the argument means nothing).
TASKS: dict[str, Callable[[Random, bool], Turn]] = {
    "addition": _addition,
    "subtraction": _subtraction,
    "three digits": _three_digits,
    "counting": _counting,
    "reversing": _reversing,
    "sorting letters": _sorting_letters,
    "sorting words": _sorting_words,
    "copying": _copying,
    "paxkv": _paxkv,
    "unknown": _unknown,
}
# Share of each task among the turns of training.
TASK_WEIGHTS: dict[str, float] = {
    "addition": 34,
    "subtraction": 24,
    "three digits": 5,
    "counting": 4,
    "reversing": 8,
    "sorting letters": 4,
    "sorting words": 4,
    "copying": 4,
    "paxkv": 10,
    "unknown": 3,
}


def sample_turn(rng: Random) -> Turn:
    """Draws one training turn."""
    task = rng.choices(list(TASK_WEIGHTS), weights=list(TASK_WEIGHTS.values()))[0]
    return TASKS[task](rng, False)


def sample_conversation(rng: Random, *, is_long: bool) -> Conversation:
    """Draws one training conversation.

    Args:
        is_long: With a system prompt of about 100 to 500 tokens; else with a short one or none.
    """
    num_turns = rng.choices((1, 2, 3, 4), weights=(45, 25, 15, 15))[0]
    turns = tuple(sample_turn(rng) for _ in range(num_turns))
    return Conversation(sample_system_prompt(rng, is_long=is_long), turns)
