"""Requests of a soak test: questions to the demo model and their only correct answers."""

import dataclasses
import random
from collections.abc import Sequence

from benchmarks.serve.request_inputs import RequestInput
from paxkv import LLM, SamplingParams

_SYSTEM_PROMPT = "You are a careful assistant. Keep every answer short and exact. "
_PAXKV_QUESTIONS = ("What is a block?", "What is paxkv?", "What is a slot?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SoakRequest:
    """One request with its sampling parameters, which determine the answer.

    Args:
        answer: The answer of `LLM.generate`.
    """

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    answer: str = ""

    @property
    def input(self) -> RequestInput:
        return RequestInput(prompt=self.prompt, max_tokens=self.max_tokens)

    @property
    def fields(self) -> dict[str, object]:
        """Fields of the body except the prompt and its length."""
        return {
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
        }


def make_requests(count: int, seed: int) -> list[SoakRequest]:
    """Makes different requests; three in four are sampled, each with its own seed.

    Their answers are long and differ from each other, so a piece in the wrong stream is noticed.
    """
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        question = f"What is {rng.randint(10, 99)} + {rng.randint(10, 99)}?"
        if index % 8 == 7:
            question = _PAXKV_QUESTIONS[index // 8 % len(_PAXKV_QUESTIONS)]
        system = _SYSTEM_PROMPT * rng.randint(0, 3)
        requests.append(
            SoakRequest(
                prompt=system + question,
                max_tokens=rng.randint(8, 96),
                temperature=rng.choice((0.0, 0.7, 1.0, 1.3)),
                seed=rng.randrange(2**31),
                ignore_eos=index % 2 == 0,
            )
        )
    return requests


def answer_offline(requests: Sequence[SoakRequest], *, batch_invariant: bool) -> list[SoakRequest]:
    """Adds the answers of `LLM.generate` to the requests.

    Omits requests with an empty answer, because their stream has no pieces.
    """
    params = [
        SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            ignore_eos=request.ignore_eos,
        )
        for request in requests
    ]
    with LLM(batch_invariant=batch_invariant) as llm:
        outputs = llm.generate([request.prompt for request in requests], params, use_tqdm=False)
    return [
        dataclasses.replace(request, answer=output.outputs[0].text)
        for request, output in zip(requests, outputs, strict=True)
        if output.outputs[0].text
    ]
