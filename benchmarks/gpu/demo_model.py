"""Checks the demo model end to end: the engine must answer on the GPU as it does on the CPU.

On the CPU, the model gives the right answer to every question below. The check therefore compares
the GPU's tokens with the tokens of the right answers, and needs no engine on the CPU.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from tokenizers import Tokenizer

from benchmarks.gpu.device_engine import DeviceEngine
from benchmarks.gpu.subject import Sizes
from benchmarks.units.unit import Finding, Measured
from benchmarks.workloads import Workload, WorkloadRequest
from models import load_model
from models.demo import CHECKPOINT
from models.demo.data import Conversation, Turn, addition_turn
from models.demo.evaluate import held_out_pairs
from models.demo.packing import encode_conversations
from models.demo.paxkv_questions import TAUGHT_ANSWERS
from models.platforms import GPU, default_platform

SYSTEM_PROMPT = (
    "You are a careful assistant. You answer questions about arithmetic and about paxkv. "
    "Keep every answer short and exact, and do not add anything that was not asked for."
)
# Sizes that cover cases of the scheduler: waiting requests, steps with both chunks of prompts and
# decodes, and bursts.
SIZES = Sizes(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_decode_burst=4,
    max_model_len=256,
    block_size=16,
    num_cache_tokens=2048,
)
# A rehearsal answers one sum, which needs two programs.
REHEARSED_SIZES = Sizes(
    max_num_seqs=1,
    max_num_batched_tokens=32,
    max_decode_burst=1,
    max_model_len=64,
    block_size=16,
    num_cache_tokens=64,
)
NUM_REHEARSED_TOKENS = 4
NUM_QUESTIONS = 24


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedHeads(GPU):
    """Pads the model's heads from 32 to 64, the smallest width that the prompt kernel supports."""

    head_dim_step: ClassVar[int] = 64


def conversations() -> list[Conversation]:
    """Returns questions: sums that training never saw, and every fourth question about paxkv.

    Three of four have the same system prompt, so they share blocks of the cache.
    """
    pairs = [(a, b) for a, b in held_out_pairs() if a >= 10 and b >= 10]
    sums = [addition_turn(*pair) for pair in pairs[:: len(pairs) // NUM_QUESTIONS]]
    facts = [Turn(taught.questions[0], taught.answer) for taught in TAUGHT_ANSWERS]
    turns = [facts[idx // 4] if idx % 4 == 3 else sums[idx] for idx in range(NUM_QUESTIONS)]
    return [
        Conversation(SYSTEM_PROMPT if idx % 4 else None, (turn,)) for idx, turn in enumerate(turns)
    ]


def check_answers(body: str, dtype: str, has_padded_heads: bool, is_rehearsal: bool) -> Measured:
    """Counts the answers with wrong tokens. A rehearsal generates the start of one answer only."""
    platform = PaddedHeads() if has_padded_heads else default_platform()
    model = load_model(str(CHECKPOINT), dtype=dtype, platform=platform)
    sizes = REHEARSED_SIZES if is_rehearsal else SIZES
    engine = DeviceEngine(model, sizes, implementation=body)
    workload, wanted = requests_of(conversations())
    if is_rehearsal:
        workload = workload.first(1, NUM_REHEARSED_TOKENS)
        wanted = [wanted[0][:NUM_REHEARSED_TOKENS]]
    got = engine.run(workload).token_ids
    wrong = [idx for idx in range(len(wanted)) if got[idx] != wanted[idx]]
    was_rejected = body == "default" and engine.chosen == "xla"
    details: dict[str, object] = {"num_answers": len(wanted)}
    if wrong:
        details["first_difference"] = {"got": got[wrong[0]], "wanted": wanted[wrong[0]]}
    return Measured(
        figures={"wrong_answers": [float(len(wrong))]},
        findings=[
            Finding(what=f"wrong answers of {len(wanted)}", error=float(len(wrong)), limit=0.0),
            Finding(what="kernels rejected at the start", error=float(was_rejected), limit=0.0),
        ],
        details=details,
    )


def requests_of(conversations: Sequence[Conversation]) -> tuple[Workload, list[list[int]]]:
    """Returns greedy requests for the questions, and the tokens of the right answers.

    Each request generates as many tokens as its right answer has.
    """
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    requests, answers = [], []
    for encoded in encode_conversations(tokenizer, conversations):
        num_prompt_tokens = encoded.is_answer.index(True)
        answers.append(encoded.token_ids[num_prompt_tokens:])
        prompt = encoded.token_ids[:num_prompt_tokens]
        requests.append(
            WorkloadRequest(prompt_token_ids=prompt, num_output_tokens=len(answers[-1]))
        )
    return Workload(name="demo", requests=requests), answers
