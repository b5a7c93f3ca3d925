"""Seeded workloads for any engine: token ids and exact output lengths.

mixed            64 requests, prompts of 32 to 256 tokens, outputs of 32 to 128
prefix           64 requests: the same 512 tokens, then 32 different ones; outputs of 16
prefix-no-hits   64 requests of 544 different tokens; outputs of 16
skewed           64 requests, prompts of 32 to 128 tokens; 8 outputs of 192 to 256 tokens and 56 of
                 8 to 32, in random order
uniform-256      256 requests, prompts and outputs uniform over 100 to 1,024 tokens

All requests arrive at the start. Engines must ignore end-of-sequence tokens, so that all of them
make the same number of tokens.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request; it ends after exactly `num_output_tokens`."""

    prompt_token_ids: list[int]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt_token_ids) + self.num_output_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in the order of their arrival."""

    name: str
    requests: list[WorkloadRequest]

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)

    def first(self, num_requests: int, max_output_tokens: int | None = None) -> "Workload":
        """The first requests, with outputs of at most `max_output_tokens`."""
        requests = self.requests[:num_requests]
        if max_output_tokens is not None:
            requests = [
                dataclasses.replace(
                    request, num_output_tokens=min(request.num_output_tokens, max_output_tokens)
                )
                for request in requests
            ]
        return Workload(name=self.name, requests=requests)

    def write(self, file: Path) -> None:
        """Writes the workload as JSON, for an engine in another process."""
        file.write_text(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def read(file: Path) -> "Workload":
        """Reads a file of `write`."""
        fields = json.loads(file.read_text())
        requests = [WorkloadRequest(**request) for request in fields["requests"]]
        return Workload(name=fields["name"], requests=requests)


def make_workload(name: str, *, vocab_size: int, seed: int = 0) -> Workload:
    """The workload of that name; the same arguments always give the same requests.

    Raises:
        KeyError: No workload has that name; `WORKLOADS` lists them.
    """
    # RandomState always draws the same numbers; default_rng may change with NumPy.
    rng = np.random.RandomState(seed)
    return Workload(name=name, requests=WORKLOADS[name](rng, vocab_size))


def _request(
    rng: np.random.RandomState,
    vocab_size: int,
    num_prompt_tokens: int,
    num_output_tokens: int,
    *,
    shared: tuple[int, ...] = (),
) -> WorkloadRequest:
    """A prompt of `num_prompt_tokens` tokens: `shared`, then random ones."""
    own = rng.randint(0, vocab_size, size=num_prompt_tokens - len(shared)).tolist()
    return WorkloadRequest(
        prompt_token_ids=[*shared, *own], num_output_tokens=int(num_output_tokens)
    )


def uniform_requests(
    rng: np.random.RandomState,
    vocab_size: int,
    *,
    num_requests: int,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
) -> list[WorkloadRequest]:
    """Requests with random tokens; lengths are uniform over both ranges, ends included."""
    return [
        _request(
            rng,
            vocab_size,
            rng.randint(prompts[0], prompts[1] + 1),
            rng.randint(outputs[0], outputs[1] + 1),
        )
        for _ in range(num_requests)
    ]


def _mixed(rng: np.random.RandomState, vocab_size: int) -> list[WorkloadRequest]:
    return uniform_requests(rng, vocab_size, num_requests=64, prompts=(32, 256), outputs=(32, 128))


def _prefix(rng: np.random.RandomState, vocab_size: int) -> list[WorkloadRequest]:
    shared = tuple(rng.randint(0, vocab_size, size=512).tolist())
    return [_request(rng, vocab_size, 544, 16, shared=shared) for _ in range(64)]


def _prefix_no_hits(rng: np.random.RandomState, vocab_size: int) -> list[WorkloadRequest]:
    return [_request(rng, vocab_size, 544, 16) for _ in range(64)]


def _skewed(rng: np.random.RandomState, vocab_size: int) -> list[WorkloadRequest]:
    output_lengths = [*rng.randint(192, 257, size=8), *rng.randint(8, 33, size=56)]
    rng.shuffle(output_lengths)
    return [
        _request(rng, vocab_size, rng.randint(32, 129), num_output_tokens)
        for num_output_tokens in output_lengths
    ]


def _uniform_256(rng: np.random.RandomState, vocab_size: int) -> list[WorkloadRequest]:
    return uniform_requests(
        rng, vocab_size, num_requests=256, prompts=(100, 1024), outputs=(100, 1024)
    )


WORKLOADS: Mapping[str, Callable[[np.random.RandomState, int], list[WorkloadRequest]]] = {
    "mixed": _mixed,
    "prefix": _prefix,
    "prefix-no-hits": _prefix_no_hits,
    "skewed": _skewed,
    "uniform-256": _uniform_256,
}
