"""Questions for the demo model, most of them after a shared system prompt."""

import re
from random import Random

SYSTEM_PROMPT = (
    "You are a careful assistant. You answer questions about arithmetic and about paxkv. "
    "Keep every answer short and exact, and do not add anything that was not asked for."
)
PAXKV_QUESTIONS = ("What is a block?", "What is paxkv?", "What is a slot?")


def demo_conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations of one question each: two-digit sums, and every eighth about paxkv itself."""
    rng = Random(seed)
    conversations = []
    for index in range(count):
        question = f"What is {rng.randint(10, 99)} + {rng.randint(10, 99)}?"
        if index % 8 == 7:
            question = PAXKV_QUESTIONS[index // 8 % len(PAXKV_QUESTIONS)]
        messages = [{"role": "user", "content": question}]
        if index % 4:
            messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
        conversations.append(messages)
    return conversations


def sum_is_right(answer: str) -> bool:
    """Whether "23 + 58 = 81" is true."""
    match = re.fullmatch(r"(\d+) \+ (\d+) = (\d+)", answer)
    return match is not None and int(match[1]) + int(match[2]) == int(match[3])
