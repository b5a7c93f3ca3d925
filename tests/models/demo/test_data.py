"""Tests of the demo model's data: the held-out split, and the conversations' shape."""

import re
from random import Random

import pytest

from models.demo import data
from models.demo.paxkv_questions import TAUGHT_ANSWERS, UNKNOWN_QUESTIONS


def _training_turns(num_conversations: int) -> list[data.Turn]:
    rng = Random(7)
    return [
        turn
        for i in range(num_conversations)
        for turn in data.sample_conversation(rng, is_long=i % 10 == 0).turns
    ]


def test_held_out_pairs_are_never_trained_in_either_order():
    num_sums = 0
    for turn in _training_turns(5000):
        match = re.fullmatch(r"(\d+) [+-] (\d+) = -?\d+", turn.answer)
        if match:
            a, b = int(match[1]), int(match[2])
            assert not data.is_held_out_pair(a, b)
            assert not data.is_held_out_pair(b, a)
            num_sums += 1
    assert num_sums > 4000


def test_about_one_pair_in_ten_is_held_out():
    num_held_out = sum(data.is_held_out_pair(a, b) for a in range(100) for b in range(100))
    assert 800 <= num_held_out <= 1200


def test_the_split_does_not_change_between_runs():
    # Written down when the shipped checkpoint was trained: another split would train on these.
    assert not data.is_held_out_pair(58, 3)
    assert [b for b in range(100) if data.is_held_out_pair(23, b)] == [
        17,
        18,
        24,
        46,
        50,
        65,
        73,
        79,
        86,
        87,
        91,
        92,
    ]


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("task", sorted(data.TASKS))
def test_every_task_gives_short_plain_turns(task, held_out):
    rng = Random(3)
    for _ in range(200):
        turn = data.TASKS[task](rng, held_out)
        assert turn.question and turn.answer == turn.answer.strip()
        assert len(turn.question) < 200 and len(turn.answer) < 300


def test_answers_are_right():
    for turn in _training_turns(2000):
        sum_match = re.fullmatch(r"(\d+) ([+-]) (\d+) = (-?\d+)", turn.answer)
        if sum_match:
            a, sign, b, result = sum_match.groups()
            assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        reverse_match = re.search(r"(?:Reverse|Spell).*'(\w+)'", turn.question)
        if reverse_match:
            assert turn.answer == "".join(reversed(reverse_match[1]))


def test_conversations_depend_only_on_the_seed():
    first = [data.sample_conversation(Random(5), is_long=False) for _ in range(3)]
    again = [data.sample_conversation(Random(5), is_long=False) for _ in range(3)]
    assert first == again


def test_no_question_has_two_answers():
    questions = [q for taught in TAUGHT_ANSWERS for q in taught.questions]
    questions += UNKNOWN_QUESTIONS
    assert len(set(questions)) == len(questions)
