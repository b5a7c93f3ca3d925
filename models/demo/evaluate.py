"""Measures exact answers on held-out prompts: `python -m models.demo.evaluate DIR`."""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from tokenizers import Tokenizer

from models.demo.checkpoint import load_checkpoint
from models.demo.data import (
    TASKS,
    Conversation,
    Turn,
    addition_turn,
    is_held_out_pair,
    subtraction_turn,
)
from models.demo.packing import assign_rows, encode_conversations, pack
from models.demo.paxkv_questions import TAUGHT_ANSWERS, UNKNOWN_ANSWER, UNKNOWN_QUESTIONS
from models.demo.system_prompts import long_system_prompt
from models.demo.training_model import DemoModel

ROW_LENGTH = 640
_ROWS_PER_CALL = 8
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """How many prompts of one task the model answers exactly."""

    task: str
    num_prompts: int
    num_exact: int

    @property
    def accuracy(self) -> float:
        return self.num_exact / self.num_prompts


def format_score(score: TaskScore) -> str:
    return f"{score.task}: {score.num_exact}/{score.num_prompts} = {score.accuracy:.1%}"


@functools.partial(jax.jit, static_argnums=0)
def _greedy_tokens(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    token_ids: jax.Array,  # i32[num_rows, row_length]
    positions: jax.Array,  # i32[num_rows, row_length]
    segment_ids: jax.Array,  # i32[num_rows, row_length]
) -> jax.Array:  # i32[num_rows, row_length]
    return nnx.merge(graphdef, params)(token_ids, positions, segment_ids).argmax(-1)


def num_exact_answers(
    model: DemoModel, tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> int:
    """Counts conversations whose every answer greedy decoding would reproduce token by token.

    The right answer is fed, not the model's own: greedy decoding writes the right answer exactly
    when the likeliest token after each right beginning is the right one, so one pass decides.
    """
    graphdef, params = nnx.split(model, nnx.Param)
    rows = assign_rows(encode_conversations(tokenizer, conversations), row_length=ROW_LENGTH)
    num_exact = 0
    for start in range(0, len(rows), _ROWS_PER_CALL):
        some = rows[start : start + _ROWS_PER_CALL]
        some += [[]] * (_ROWS_PER_CALL - len(some))
        packed = pack(some, row_length=ROW_LENGTH)
        greedy = np.asarray(
            _greedy_tokens(graphdef, params, packed.token_ids, packed.positions, packed.segment_ids)
        )
        is_wrong = (greedy[:, :-1] != packed.token_ids[:, 1:]) & packed.is_answer[:, 1:]
        for row_idx, row in enumerate(some):
            wrong_segments = set(packed.segment_ids[row_idx, 1:][is_wrong[row_idx]].tolist())
            num_exact += len(row) - len(wrong_segments)
    return num_exact


def held_out_pairs() -> list[tuple[int, int]]:
    """Every ordered pair of numbers below 100 that training never sees, about a thousand."""
    return [(a, b) for a in range(100) for b in range(100) if is_held_out_pair(a, b)]


def _sample(pairs: Sequence[Turn], num: int, rng: Random) -> list[Turn]:
    return list(pairs) if len(pairs) <= num else rng.sample(pairs, num)


def evaluation_turns(num_per_task: int) -> dict[str, list[Turn]]:
    """The questions of every task, from operands that training never sees."""
    rng = Random(_SEED)
    pairs = held_out_pairs()
    both = [(a, b) for a, b in pairs if a >= 10 and b >= 10]
    turns = {
        "addition": _sample([addition_turn(a, b) for a, b in pairs], num_per_task, rng),
        "addition, both two digits": _sample(
            [addition_turn(a, b) for a, b in both], num_per_task, rng
        ),
        "subtraction": _sample([subtraction_turn(a, b) for a, b in pairs], num_per_task, rng),
    }
    for task in ("addition", "subtraction"):
        turns[f"{task}, any phrasing"] = [TASKS[task](rng, True) for _ in range(num_per_task)]
    for task in (
        "three digits",
        "counting",
        "reversing",
        "sorting letters",
        "sorting words",
        "copying",
    ):
        turns[task] = [TASKS[task](rng, True) for _ in range(num_per_task)]
    turns["paxkv"] = [Turn(q, taught.answer) for taught in TAUGHT_ANSWERS for q in taught.questions]
    turns["unknown"] = [Turn(question, UNKNOWN_ANSWER) for question in UNKNOWN_QUESTIONS]
    return turns


def evaluate(model: DemoModel, tokenizer: Tokenizer, *, num_per_task: int) -> list[TaskScore]:
    """Scores every task, and some tasks also after long system prompts that training never saw."""
    rng = Random(_SEED)
    conversations = {
        task: [Conversation(None, (turn,)) for turn in turns]
        for task, turns in evaluation_turns(num_per_task).items()
    }
    for task in ("addition", "subtraction", "paxkv"):
        few = conversations[task][: max(1, num_per_task // 4)]
        conversations[f"{task}, long system prompt"] = [
            Conversation(long_system_prompt(rng, rng.randrange(8, 36)), one.turns) for one in few
        ]
    return [
        TaskScore(
            task=task,
            num_prompts=len(some),
            num_exact=num_exact_answers(model, tokenizer, some),
        )
        for task, some in conversations.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--num-per-task", type=int, default=1000)
    args = parser.parse_args(argv)
    if args.num_per_task < 1:
        parser.error(f"--num-per-task must be at least 1, got {args.num_per_task}")
    try:
        model, tokenizer = load_checkpoint(args.checkpoint)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        parser.error(
            f"{args.checkpoint} is no checkpoint that models.demo.train wrote "
            f"({type(error).__name__}: {error})"
        )
    for score in evaluate(model, tokenizer, num_per_task=args.num_per_task):
        print(format_score(score))


if __name__ == "__main__":
    main()
