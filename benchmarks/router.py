"""Simulates a fleet of engines behind `PrefixRouter`: hit rate, imbalance, decisions per second.

    python -m benchmarks.router

Requests arrive at random moments. Each has one of many shared prefixes, drawn with Zipf weights
(the k-th most frequent has weight 1/k), and a tail of its own. A simulated replica holds a limited
number of token positions and evicts the least recently used ones. A request occupies its replica
for a fixed time, plus a time per chunk of 16 prompt tokens that the replica's cache lacks. The time
is simulated; only the router's decisions take CPU time, which is measured.

Policies: `prefix` chooses as paxkv does, `least-busy` ignores prompts, `round-robin` ignores load
too. With several routers, each sees every replica's number of requests but only its own prompts.

- hit_percent: Prompt tokens in shared prefixes that the replica had cached.
- imbalance: The largest number of a replica's unfinished requests, divided by the mean; the mean of
  100 moments of the second half.
- slowest_ms: 99th percentile of the simulated times of requests.
- decisions_per_cpu_s: Requests per second of CPU time in which one process chooses a replica,
  records the prompt, and counts the request's start and end. Computing digests is not included.
- digests_per_cpu_s: Chat requests per second of CPU time of which one process computes the digests.
"""

import argparse
import bisect
import dataclasses
import heapq
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.command_line import output_file, positive_int, run_benchmark
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table
from paxkv.fleet.prefix_router import PrefixRouter
from paxkv.fleet.prompt_digest import CHUNK_TOKENS, body_chain

POLICIES = ("prefix", "least-busy", "round-robin")
_BASE_S = 0.05
_CHUNK_S = 0.001
_NUM_MOMENTS = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The simulated requests and replicas.

    Args:
        rate_per_s: Arrivals per second, of all replicas together.
        prefix_chunks: Chunks of each shared prefix.
        tail_chunks: Chunks that only one request has.
        cache_tokens: Token positions of each replica's cache.
    """

    num_replicas: int = 1000
    num_requests: int = 400_000
    rate_per_s: int = 100_000
    num_prefixes: int = 20_000
    prefix_chunks: int = 32
    tail_chunks: int = 8
    cache_tokens: int = 65_536
    num_routers: int = 1


@dataclasses.dataclass(slots=True)
class _Sums:
    known_chunks: int = 0
    decision_ns: int = 0
    imbalances: list[float] = dataclasses.field(default_factory=list)
    times_s: list[float] = dataclasses.field(default_factory=list)


def simulate(workload: Workload, policy: str) -> dict[str, float]:
    """Runs the requests; returns the figures by metric."""
    rng = random.Random(0)
    replicas = range(workload.num_replicas)
    # The caches of the replicas, which a router does not see.
    caches = PrefixRouter[int]()
    routers = [PrefixRouter[int]() for _ in range(workload.num_routers)]
    for each, idx in itertools.product((caches, *routers), replicas):
        each.add(idx, workload.cache_tokens)
    choose = _chooser(policy, workload.num_replicas)
    draw_prefix = _zipf(workload, rng)
    loads = [0] * workload.num_replicas
    endings: list[tuple[float, int]] = []
    sums = _Sums()
    period = max(1, workload.num_requests // (2 * _NUM_MOMENTS))
    now_s = 0.0
    clock = time.thread_time_ns
    for number in range(workload.num_requests):
        now_s += rng.expovariate(workload.rate_per_s)
        prefix = draw_prefix()
        chain = [*prefix, *(rng.getrandbits(64) for _ in range(workload.tail_chunks))]
        ended = []
        while endings and endings[0][0] <= now_s:
            ended.append(heapq.heappop(endings)[1])
        router = routers[number % workload.num_routers]
        start_ns = clock()
        for idx in ended:
            loads[idx] -= 1
            for each in routers:
                each.set_num_requests(idx, loads[idx])
        chosen = choose(router, chain)
        router.record(chosen, chain)
        loads[chosen] += 1
        for each in routers:
            each.set_num_requests(chosen, loads[chosen])
        sums.decision_ns += clock() - start_ns
        num_known = caches.num_known(chosen, chain)
        caches.record(chosen, chain)
        sums.known_chunks += num_known
        taken_s = _BASE_S + _CHUNK_S * (len(chain) - num_known)
        sums.times_s.append(taken_s)
        heapq.heappush(endings, (now_s + taken_s, chosen))
        if number >= workload.num_requests // 2 and number % period == 0:
            sums.imbalances.append(max(loads) / statistics.mean(loads))
    prefix_chunks = workload.num_requests * workload.prefix_chunks
    return {
        "hit_percent": 100 * sums.known_chunks / prefix_chunks,
        "imbalance": statistics.mean(sums.imbalances),
        "slowest_ms": 1e3 * statistics.quantiles(sums.times_s, n=100)[-1],
        "decisions_per_cpu_s": workload.num_requests / sums.decision_ns * 1e9,
    }


def _chooser(policy: str, num_replicas: int) -> Callable[[PrefixRouter[int], list[int]], int]:
    if policy == "prefix":
        return lambda router, chain: router.choose(chain)
    if policy == "least-busy":
        return lambda router, chain: router.choose(())
    turns = itertools.cycle(range(num_replicas))
    return lambda router, chain: next(turns)


def _zipf(workload: Workload, rng: random.Random) -> Callable[[], list[int]]:
    """Draws the chunks of a shared prefix."""
    num_chunks = workload.prefix_chunks
    prefixes = [
        [rng.getrandbits(64) for _ in range(num_chunks)] for _ in range(workload.num_prefixes)
    ]
    sums = list(itertools.accumulate(1 / k for k in range(1, workload.num_prefixes + 1)))
    return lambda: prefixes[bisect.bisect(sums, rng.random() * sums[-1], hi=len(sums) - 1)]


def measure_digests(num_tokens: int, *, num_requests: int = 2000) -> float:
    """Chat requests per CPU second of which the digests are computed.

    Args:
        num_tokens: Prompt tokens, of four bytes each.
    """
    content = "four" * num_tokens
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    start_ns = time.thread_time_ns()
    for _ in range(num_requests):
        body_chain(body)
    return num_requests / (time.thread_time_ns() - start_ns) * 1e9


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(Workload):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=positive_int, default=field.default, metavar="N")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    out = str(RESULTS_FOLDER / "router.jsonl")
    parser.add_argument("--out", type=output_file, default=out)
    arguments = vars(parser.parse_args(argv))
    policies, out = arguments.pop("policies"), arguments.pop("out")
    workload = Workload(**arguments)
    case = " ".join(f"{name}={value}" for name, value in arguments.items())
    figures = {
        (f"policy={policy} {case}", metric): value
        for policy in policies
        for metric, value in simulate(workload, policy).items()
    }
    num_tokens = (workload.prefix_chunks + workload.tail_chunks) * CHUNK_TOKENS
    figures[f"num_tokens={num_tokens}", "digests_per_cpu_s"] = measure_digests(num_tokens)
    rows = [
        ResultRow(
            benchmark="benchmarks.router",
            case=case,
            metric=metric,
            values=[value],
            device=processor_name(),
        )
        for (case, metric), value in figures.items()
    ]
    append_rows(rows, out)
    lines = [[row.metric, row.case.split()[0], f"{row.median:,.1f}"] for row in rows]
    print(markdown_table(["figure", "case", "value"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
