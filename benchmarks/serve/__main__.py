"""Puts load on any OpenAI-compatible server and reports what its clients see.

Start a server, then, from elsewhere or beside it:

    python -m paxkv.serve
    python -m benchmarks.serve --num-prompts 200 --request-rate 10 --ignore-eos

Requests are streamed from /v1/completions. How they are sent:

    open loop     --request-rate 10         they arrive at random, 10 a second on average (Poisson),
                                            whether the server keeps up or not
    closed loop   --max-concurrency 8       8 clients; each sends its next when its last is answered
    both          both flags                they arrive at the rate; beyond 8 at once they wait here
    neither                                 all at once

What is asked for:

    --dataset random         prompts of random token ids, --random-input-len and --random-output-len
                             long; with --random-range-ratio 0.5, from half of that to one and a
                             half times
    --dataset shared-prefix  the same behind --shared-prefix-len tokens, which all have in common
                             (or, with --num-prefixes, groups of them)
    --dataset sharegpt       first questions of the conversations in --dataset-path, a JSON file in
                             ShareGPT's format

What is reported, in milliseconds, as mean, p50, p90 and p99 over the requests that were answered:

    TTFT    from sending a request to its first token
    TPOT    from its first token to its last, a token: one figure a request
    ITL     from one piece of the stream to the next, over all pieces of all requests; a server may
            put several tokens into a piece, so that its mean may lie above that of TPOT, and
            several pieces may come at once, with no time between them
    E2E     from sending to the last token
    wait    at a rate: how much later than its arrival a request was sent, because of
            --max-concurrency; without that, it should be near 0, or this program is too slow

A token has come when the piece comes that it is in: a server that holds half a character back sends
it with the next. Output tokens are those of the server's `usage`; where it sends none, pieces are
counted, and the report says so. Goodput is the rate of the requests that keep all bounds of
--goodput. Requests that fail are counted and shown, and in no latency; the exit code is 1 if none
was answered. OPENAI_API_KEY, if set, is sent as the key.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import os
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
    """One load a repetition, each with its own seed.

    Raises:
        InputError: What is asked for cannot be made.
        ServerError: The server does not answer, or not a warm-up request.
    """
    summaries = []
    async with CompletionsClient(
        arguments.base_url,
        api_key=os.environ.get("OPENAI_API_KEY"),
        timeout_s=arguments.timeout_s,
    ) as client:
        # Into the arguments, where the rows find it.
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
    # Of the same kind as the rest, but none of them: their prompts must not be known already.
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
    """Requests for the warm-up, then those of the load.

    Raises:
        InputError: They cannot be made.
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
