"""Sends load to any OpenAI-compatible server, and reports the latencies that clients see.

Start a server, then run this from the same or another machine:

    python -m paxkv.serve
    python -m benchmarks.serve --num-prompts 200 --request-rate 10 --ignore-eos

Answers are streamed from /v1/completions. These flags decide when requests are sent:

    open loop     --request-rate 10         requests arrive at random, 10 per second on average
                                            (Poisson), independent of the server's speed
    closed loop   --max-concurrency 8       8 clients; each sends its next request after an answer
    both          both flags                requests arrive at the rate; at most 8 run at once, and
                                            the others wait in this program
    neither                                 all at once

The prompts:

    --dataset random         random token ids of length --random-input-len, outputs of length
                             --random-output-len; with --random-range-ratio 0.5, lengths from 0.5 to
                             1.5 times these
    --dataset shared-prefix  random prompts after --shared-prefix-len tokens that all requests share
                             (with --num-prefixes, each group of requests shares its own)
    --dataset sharegpt       first questions of the conversations in --dataset-path, a JSON file in
                             ShareGPT's format

The report has milliseconds, as mean, p50, p90 and p99 over the answered requests:

    TTFT    from sending a request to its first token
    TPOT    from the first token to the last, per token; one figure per request
    ITL     between two pieces of a stream, over all pieces of all requests. A piece may hold
            several tokens, so the mean may be above that of TPOT; several pieces may arrive at once
    E2E     from sending to the last token
    wait    with --request-rate: from a request's arrival to its sending, because of
            --max-concurrency. Without that flag it must be near 0, or this program is too slow

Output tokens are counted from the server's `usage`. If the server sends none, pieces are counted,
and the report says so. Goodput is the rate of requests that meet all bounds of --goodput. Failed
requests are counted and shown, but their latencies are not. The exit code is 1 if no request was
answered. The first key in PAXKV_API_KEY, VLLM_API_KEY or OPENAI_API_KEY is sent, if there is one.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import run_benchmark
from benchmarks.result_rows import append_rows
from benchmarks.serve.command_line import make_parser
from benchmarks.serve.completions_client import CompletionsClient, ServerError
from benchmarks.serve.load import poisson_arrivals, send_load, warm_up
from benchmarks.serve.report import report, result_rows
from benchmarks.serve.request_inputs import (
    InputError,
    RandomLengths,
    RequestInput,
    random_inputs,
    shared_prefix_inputs,
    sharegpt_inputs,
)
from benchmarks.serve.request_record import RequestRecord
from benchmarks.serve.summary import LoadSummary, summarize
from paxkv.config.environment import API_KEY_VARIABLES, words_from_environment

# The variables of the server under test, then the one of OpenAI's clients.
_KEY_VARIABLES = (*API_KEY_VARIABLES, "OPENAI_API_KEY")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser(__doc__).parse_args(argv)
    try:
        summaries = asyncio.run(run(arguments))
    except (InputError, ServerError) as error:
        print(f"benchmarks.serve: error: {error}", file=sys.stderr)
        return 1
    rows = result_rows(arguments, summaries)
    is_answered = any(summary.num_failed < summary.num_requests for summary in summaries)
    if is_answered:
        append_rows(rows, arguments.out)
    print(report(rows, summaries))
    return 0 if is_answered else 1


async def run(arguments: argparse.Namespace) -> list[LoadSummary]:
    """Sends one load per repetition, each with its own seed.

    Raises:
        InputError: The requests cannot be made.
        ServerError: The server does not answer, or a warm-up request fails.
    """
    summaries = []
    async with CompletionsClient(
        arguments.base_url,
        api_key=next(iter(words_from_environment(_KEY_VARIABLES)), None),
        timeout_s=arguments.timeout_s,
    ) as client:
        # The rows read the name from the arguments.
        arguments.model = arguments.model or await client.first_model()
        for seed in range(arguments.seed, arguments.seed + arguments.num_repetitions):
            records = await _run_load(client, arguments, seed)
            if arguments.save_requests is not None:
                _save_requests(records, seed, arguments.save_requests)
            has_arrivals = arguments.request_rate < math.inf
            summaries.append(summarize(records, dict(arguments.goodput), has_arrivals=has_arrivals))
    return summaries


async def _run_load(
    client: CompletionsClient, arguments: argparse.Namespace, seed: int
) -> list[RequestRecord]:
    inputs = make_inputs(arguments, seed)
    fields = {"model": arguments.model, "temperature": arguments.temperature}
    if arguments.ignore_eos:
        fields["ignore_eos"] = True
    fields |= arguments.extra_body
    # Warm-up requests have other prompts than the load, so that the load's prompts are not cached.
    await warm_up(client, inputs[: arguments.num_warmups], fields)
    arrivals = poisson_arrivals(arguments.num_prompts, arguments.request_rate, seed)
    return await send_load(
        client,
        inputs[arguments.num_warmups :],
        fields,
        arrivals=arrivals,
        max_concurrency=arguments.max_concurrency,
    )


def make_inputs(arguments: argparse.Namespace, seed: int) -> list[RequestInput]:
    """Requests for the warm-up, then requests for the load.

    Raises:
        InputError: The requests cannot be made.
    """
    num_requests = arguments.num_warmups + arguments.num_prompts
    if arguments.dataset == "sharegpt":
        if arguments.dataset_path is None:
            raise InputError("--dataset sharegpt needs --dataset-path FILE.")
        return sharegpt_inputs(
            num_requests,
            arguments.dataset_path,
            tokenizer_file=arguments.tokenizer,
            output_len=arguments.sharegpt_output_len,
            max_total_len=arguments.sharegpt_max_len,
            seed=seed,
        )
    lengths = RandomLengths(
        input_len=arguments.random_input_len,
        output_len=arguments.random_output_len,
        range_ratio=arguments.random_range_ratio,
    )
    token_ids = tuple(arguments.token_ids)
    if arguments.dataset == "random":
        return random_inputs(num_requests, lengths, token_ids=token_ids, seed=seed)
    return shared_prefix_inputs(
        num_requests,
        lengths,
        prefix_len=arguments.shared_prefix_len,
        num_prefixes=arguments.num_prefixes,
        token_ids=token_ids,
        seed=seed,
    )


def _save_requests(records: Sequence[RequestRecord], seed: int, file: Path) -> None:
    with file.open("a") as out:
        for record in records:
            out.write(json.dumps({"seed": seed} | dataclasses.asdict(record)) + "\n")


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
