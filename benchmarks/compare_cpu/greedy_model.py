"""The interface of the programs that are compared, and how each is measured.

Imports only the standard library, because these modules also run in environments without paxkv.
"""

import abc
import time
from collections.abc import Sequence
from pathlib import Path

NUM_PROMPT_TOKENS = 128
# Length of the prompts of requests whose decode steps are timed.
NUM_SHORT_PROMPT_TOKENS = 16
# Tokens of the short and of the long answer. Only decode steps make their times differ.
ANSWER_LENS = (4, 20)
MAX_STREAMS = 8
# Tokens that a request may have.
MAX_MODEL_LEN = 256
_MIB = 2**20


class GreedyModel(abc.ABC):
    """A loaded model that answers prompts of token ids greedily."""

    @abc.abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """The next `num_tokens` tokens of up to `MAX_STREAMS` prompts, computed together."""

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Package -> version."""


def measure(model: GreedyModel, *, vocab_size: int, num_repetitions: int) -> dict[str, list[float]]:
    """Figures of the program in this process: name -> one value per repetition.

    Raises:
        ValueError: An answer does not have the requested number of tokens.
    """
    num_prompts = 0

    def timed(num_streams: int, num_prompt_tokens: int, num_tokens: int) -> tuple[float, float]:
        """Wall and CPU milliseconds."""
        nonlocal num_prompts
        # No two prompts start alike, so that no program can reuse an earlier prompt.
        prompts = [
            _prompt(num_prompts + idx, num_prompt_tokens, vocab_size) for idx in range(num_streams)
        ]
        num_prompts += num_streams
        start, cpu_start = time.perf_counter(), time.process_time()
        answers = model.generate(prompts, num_tokens)
        times = time.perf_counter() - start, time.process_time() - cpu_start
        if [len(answer) for answer in answers] != [num_tokens] * num_streams:
            raise ValueError(f"answers have {list(map(len, answers))} tokens, not {num_tokens}.")
        return 1000 * times[0], 1000 * times[1]

    figures: dict[str, list[float]] = {}
    # The first repetition warms up.
    for repetition in range(num_repetitions + 1):
        wall_ms, cpu_ms = timed(1, NUM_PROMPT_TOKENS, 1)
        found = {
            "prompt_tokens_per_s": 1000 * NUM_PROMPT_TOKENS / wall_ms,
            "prompt_cpu_ms": cpu_ms,
        }
        for num_streams in (1, MAX_STREAMS):
            short, long = (timed(num_streams, NUM_SHORT_PROMPT_TOKENS, n) for n in ANSWER_LENS)
            num_steps = ANSWER_LENS[1] - ANSWER_LENS[0]
            found[f"step_ms_{num_streams}"] = (long[0] - short[0]) / num_steps
            found[f"step_cpu_ms_{num_streams}"] = (long[1] - short[1]) / num_steps
        if repetition:
            for name, value in found.items():
                figures.setdefault(name, []).append(value)
    return figures


def first_tokens(model: GreedyModel, *, vocab_size: int) -> list[int]:
    """The first greedy token of some prompts, which another program should give too."""
    prompts = [_prompt(-1 - idx, NUM_SHORT_PROMPT_TOKENS, vocab_size) for idx in range(MAX_STREAMS)]
    return [answer[0] for answer in model.generate(prompts, 1)]


def _prompt(number: int, num_tokens: int, vocab_size: int) -> list[int]:
    # Multiples of primes, so the tokens of a prompt spread over the vocabulary.
    return [(7919 * (number + 1) + 104_729 * idx) % vocab_size for idx in range(num_tokens)]


def peak_mib() -> float:
    """The highest resident memory of this process, with the mapped pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / _MIB
