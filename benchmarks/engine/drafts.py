"""Tokens per second with drafts from the text, compared with an engine without them, in one run.

    python -m benchmarks.engine.drafts
    python -m benchmarks.engine.drafts --requests 1 --repetitions 3 --out FILE

Two engines of this process, which differ only in `speculative_config`, take turns to answer the
same requests. The benchmark fails if an answer differs. It prints these figures, and writes them as
rows with --out. The first two are ratios of the engine with drafts to the other, per repetition.

    times_tokens_per_s       output tokens per second
    times_tokens_per_cpu_s   output tokens per second of processor time
    acceptance_percent       drafts that were accepted
    tokens_per_step          output tokens of a request, for each step that verified drafts for it

Workloads, with weights in the shape of the model `small`:

    copy      the answer copies pieces of the prompt, about ten tokens long, as a summary does. The
              weights of attention and MLPs are set so that the next token depends on the last one
              alone; sampling makes one token of ten jump.
    random    the next token depends on all tokens, and tokens hardly ever repeat.
    useless   tokens repeat, and what follows them does not: they are drawn from 16 tokens.

The drafter is `ngram`, or `suffix` in the workloads `copy_suffix` and `random_suffix`.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.command_line import BenchmarkError, output_file, positive_int, run_benchmark
from benchmarks.random_checkpoint import MODEL_SHAPES, write_checkpoint
from benchmarks.result_rows import ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table, spread
from paxkv import LLM, SamplingParams

BENCHMARK = "benchmarks.engine.drafts"
SPECULATIVE = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
# Without answers of finished requests, because all repetitions have the same answers.
SUFFIX = {
    "method": "suffix",
    "num_speculative_tokens": 4,
    "suffix_decoding_max_cached_requests": 0,
}
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 256, 192
# Tokens after which a copying model is back at the first one.
CYCLE_LEN = 192
# With it, a copying model takes the next token of its cycle nine times of ten.
COPY_TEMPERATURE = 3.0
METRICS = (
    *("times_tokens_per_s", "times_tokens_per_cpu_s"),
    *("acceptance_percent", "tokens_per_step"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of one workload.

    Args:
        is_copying: Whether the model is that of `write_copying_checkpoint`.
    """

    is_copying: bool
    speculative: Mapping[str, object]

    def requests(
        self, num_requests: int, vocab_size: int
    ) -> list[tuple[list[int], SamplingParams]]:
        """Prompts with their sampling parameters; the same at every call."""
        rng = np.random.RandomState(num_requests)
        found = []
        for seed in range(num_requests):
            prompt = rng.randint(0, vocab_size, NUM_PROMPT_TOKENS).tolist()
            params = SamplingParams(
                max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, temperature=1.0, seed=seed
            )
            found.append(self._request(prompt, params))
        return found

    def _request(
        self, prompt: list[int], params: SamplingParams
    ) -> tuple[list[int], SamplingParams]:
        return prompt, params


class CopyTraffic(Traffic):
    """Prompts that walk around a cycle of the copying model."""

    def _request(
        self, prompt: list[int], params: SamplingParams
    ) -> tuple[list[int], SamplingParams]:
        start, place = prompt[0] // CYCLE_LEN * CYCLE_LEN, prompt[0] % CYCLE_LEN
        start = min(start, MODEL_SHAPES["small"].vocab_size // CYCLE_LEN * CYCLE_LEN - CYCLE_LEN)
        cycle = [start + (place + idx) % CYCLE_LEN for idx in range(len(prompt))]
        return cycle, dataclasses.replace(
            params,
            temperature=COPY_TEMPERATURE,
            allowed_token_ids=[*range(start, start + CYCLE_LEN)],
        )


class UselessTraffic(Traffic):
    """Prompts and answers of few tokens in any order."""

    def _request(
        self, prompt: list[int], params: SamplingParams
    ) -> tuple[list[int], SamplingParams]:
        few = [*range(16)]
        return [token_id % 16 for token_id in prompt], dataclasses.replace(
            params, temperature=2.0, allowed_token_ids=few
        )


TRAFFIC: Mapping[str, Traffic] = {
    "copy": CopyTraffic(is_copying=True, speculative=SPECULATIVE),
    "copy_suffix": CopyTraffic(is_copying=True, speculative=SUFFIX),
    "random": Traffic(is_copying=False, speculative=SPECULATIVE),
    "random_suffix": Traffic(is_copying=False, speculative=SUFFIX),
    "useless": UselessTraffic(is_copying=False, speculative=SPECULATIVE | {"prompt_lookup_min": 1}),
}


def write_copying_checkpoint(folder: Path, model: str) -> Path:
    """Writes a model whose next token depends on the last one: tokens form cycles.

    All products are computed as in other models, with zeros in the last product of each part.
    """
    shape = MODEL_SHAPES[model]
    write_checkpoint(folder, shape)
    weights = load_file(folder / "model.safetensors")
    for name, weight_np in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = np.zeros_like(weight_np)
    token_ids_np = np.arange(shape.vocab_size)
    before_np = token_ids_np // CYCLE_LEN * CYCLE_LEN + (token_ids_np - 1) % CYCLE_LEN
    before_np = np.minimum(before_np, shape.vocab_size - 1)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][before_np]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of an engine.

    Args:
        num_steps: Steps of single requests that verified drafts.
    """

    token_ids: list[list[int]]
    wall_s: float
    cpu_s: float
    num_steps: int
    num_drafts: int
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


def run(llm: LLM, requests: Sequence[tuple[list[int], SamplingParams]]) -> Run:
    """Answers all requests, which arrive at the same time."""
    before = llm.get_stats()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    outputs = llm.generate(
        [prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    after = llm.get_stats()
    return Run(
        token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        wall_s=wall_s,
        cpu_s=cpu_s,
        num_steps=after.num_drafts - before.num_drafts,
        num_drafts=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
    )


def compare(plain: Run, drafting: Run) -> dict[str, float]:
    """The figures of one repetition.

    Raises:
        BenchmarkError: The answers differ.
    """
    if plain.token_ids != drafting.token_ids:
        raise BenchmarkError("the answers with drafts differ from those without them.")
    num_drafts, num_steps = drafting.num_drafts, drafting.num_steps
    return {
        "times_tokens_per_s": plain.wall_s / drafting.wall_s,
        "times_tokens_per_cpu_s": plain.cpu_s / drafting.cpu_s,
        "acceptance_percent": 100 * drafting.num_accepted / num_drafts if num_drafts else 0.0,
        "tokens_per_step": 1 + drafting.num_accepted / num_steps if num_steps else 1.0,
    }


def measure(
    folder: Path, traffic: Traffic, num_requests: Sequence[int], num_repetitions: int
) -> dict[int, dict[str, list[float]]]:
    """The figures of each repetition, by number of requests and by metric."""
    settings = {
        "max_model_len": NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS,
        "max_num_seqs": max(num_requests),
        "enable_prefix_caching": False,
    }
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    found: dict[int, dict[str, list[float]]] = {}
    with (
        LLM(folder, **settings) as plain,
        LLM(folder, **settings, speculative_config=traffic.speculative) as drafting,
    ):
        for num in num_requests:
            requests = traffic.requests(num, vocab_size)
            found[num] = {metric: [] for metric in METRICS}
            # The first repetition warms up.
            for repetition in range(num_repetitions + 1):
                figures = compare(run(plain, requests), run(drafting, requests))
                for metric, value in figures.items():
                    found[num][metric] += [value] if repetition else []
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {BENCHMARK}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workloads", choices=sorted(TRAFFIC), nargs="+", default=[*TRAFFIC])
    parser.add_argument("--requests", type=positive_int, nargs="+", default=[1, 8, 64], metavar="N")
    parser.add_argument("--repetitions", type=positive_int, default=3, metavar="N")
    parser.add_argument("--out", type=output_file)
    arguments = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        copying = write_copying_checkpoint(Path(name, "copying"), "small")
        plain = write_checkpoint(Path(name, "random"), MODEL_SHAPES["small"])
        for workload in arguments.workloads:
            traffic = TRAFFIC[workload]
            folder = copying if traffic.is_copying else plain
            found = measure(folder, traffic, arguments.requests, arguments.repetitions)
            rows += [
                ResultRow(
                    benchmark=BENCHMARK,
                    case=f"{workload} requests={num}",
                    metric=metric,
                    values=values,
                    device=processor_name(),
                )
                for num, figures in found.items()
                for metric, values in figures.items()
            ]
    if arguments.out is not None:
        append_rows(rows, arguments.out)
    per_case = [rows[i : i + len(METRICS)] for i in range(0, len(rows), len(METRICS))]
    lines = [[case[0].case, *(spread(row.values) for row in case)] for case in per_case]
    print(markdown_table(["case", *METRICS], lines))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
