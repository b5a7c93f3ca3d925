"""Tokens per second with drafts, compared with an engine without them, in one run.

    python -m benchmarks.engine.drafts
    python -m benchmarks.engine.drafts --workloads copy demo_eagle3 --requests 1 --out FILE

Two engines of this process, which differ only in `speculative_config`, answer the same requests.
They take turns, and each runs first in every second repetition. A repetition before the measured
ones warms up. The benchmark fails if an answer differs. It prints these figures, and writes them as
rows with --out. The first two are ratios of the engine with drafts to the other, per repetition.
The third is the ratio of all repetitions together, on which a single slow repetition has less
effect.

    times_tokens_per_s             output tokens per second
    times_tokens_per_cpu_s         output tokens per second of processor time
    total_times_tokens_per_cpu_s   as above, of all repetitions together
    acceptance_percent             drafts that were accepted
    tokens_per_step                output tokens of a request, for each step that verified drafts
                                   for it

Workloads, with random weights in the shape of the model `small` with 4 layers and 8192 tokens:

    copy      the answer copies pieces of the prompt, about ten tokens long, as a summary does. The
              weights of attention and MLPs are set so that the next token depends on the last one
              alone; sampling makes about one token of ten jump.
    random    the next token depends on all tokens, and tokens hardly ever repeat.
    useless   tokens are drawn from 16 tokens: they repeat, but the tokens after them do not.

The drafter is `ngram`. Two workloads have the requests of `copy` and another drafter:

    copy_suffix        `suffix`
    copy_draft_model   a model of two layers, with weights that are set in the same way

Workloads with the demo model. It answers 32 questions, or more if --requests is larger:

    demo_eagle3        the drafter is the demo model's head
    demo_draft_model   the drafter is the first two layers of the demo model
"""

import argparse
import dataclasses
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.command_line import BenchmarkError, output_file, positive_int, run_benchmark
from benchmarks.random_checkpoint import MODEL_SHAPES, ModelShape, write_checkpoint
from benchmarks.result_rows import ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table, spread
from models.demo import CHECKPOINT, DRAFT_HEAD
from models.demo.generation import render_question
from paxkv import LLM, SamplingParams

BENCHMARK = "benchmarks.engine.drafts"
# The smallest step that verifies drafts has eight tokens, so fewer drafts take as long.
SPECULATIVE = {
    "method": "ngram",
    "num_speculative_tokens": 7,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
# Without answers of finished requests, because all repetitions have the same answers.
SUFFIX = {
    "method": "suffix",
    "num_speculative_tokens": 7,
    "suffix_decoding_max_cached_requests": 0,
}
# The config's `model` is the name of a checkpoint that `write_checkpoints` writes.
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 4}
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3}
SHAPE = dataclasses.replace(MODEL_SHAPES["small"], num_layers=4, vocab_size=8192)
DRAFT_SHAPE = dataclasses.replace(MODEL_SHAPES["tiny"], hidden_size=128, vocab_size=8192)
NUM_PROMPT_TOKENS = 64
MAX_OUTPUT_TOKENS = 192
# Tokens after which a copying model is back at the first one.
CYCLE_LEN = 48
# With it, a copying model takes the next token of its cycle about nine times of ten.
COPY_TEMPERATURE = 3.7
NUM_QUESTIONS = 32
METRICS = (
    *("times_tokens_per_s", "times_tokens_per_cpu_s", "total_times_tokens_per_cpu_s"),
    *("acceptance_percent", "tokens_per_step"),
)


Request = tuple[list[int] | str, SamplingParams]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of one workload.

    Args:
        checkpoint: Name of a checkpoint that `write_checkpoints` writes.
    """

    checkpoint: str
    speculative: Mapping[str, object]

    def requests(self, num_requests: int, vocab_size: int) -> list[Request]:
        """Prompts with their sampling parameters; the same at every call.

        Args:
            num_requests: Number of requests that are answered together.
        """
        rng = np.random.RandomState(num_requests)
        found = []
        for seed in range(num_requests):
            prompt = rng.randint(0, vocab_size, NUM_PROMPT_TOKENS).tolist()
            params = SamplingParams(
                # Many requests take longer.
                max_tokens=max(32, min(MAX_OUTPUT_TOKENS, 1024 // num_requests)),
                ignore_eos=True,
                temperature=1.0,
                seed=seed,
            )
            found.append(self._request(prompt, params))
        return found

    def _request(self, prompt: list[int], params: SamplingParams) -> Request:
        return prompt, params


class CopyTraffic(Traffic):
    """Prompts that walk around a cycle of the copying model."""

    def _request(self, prompt: list[int], params: SamplingParams) -> Request:
        start, place = prompt[0] // CYCLE_LEN * CYCLE_LEN, prompt[0] % CYCLE_LEN
        start = min(start, SHAPE.vocab_size // CYCLE_LEN * CYCLE_LEN - CYCLE_LEN)
        cycle = [start + (place + idx) % CYCLE_LEN for idx in range(len(prompt))]
        return cycle, dataclasses.replace(
            params,
            temperature=COPY_TEMPERATURE,
            allowed_token_ids=[*range(start, start + CYCLE_LEN)],
        )


class UselessTraffic(Traffic):
    """Prompts and answers of few tokens in any order."""

    def _request(self, prompt: list[int], params: SamplingParams) -> Request:
        few = [*range(16)]
        return [token_id % 16 for token_id in prompt], dataclasses.replace(
            params, temperature=2.0, allowed_token_ids=few
        )


class DemoTraffic(Traffic):
    """Questions to the demo model, with greedy answers."""

    def requests(self, num_requests: int, vocab_size: int) -> list[Request]:
        params = SamplingParams(temperature=0.0, max_tokens=64)
        kinds = itertools.cycle(
            ("What is {0} + {1}?", "Count from {0} to {2}.", "What is a block table?")
        )
        questions = (
            kind.format(13 + 7 * idx % 80, 29 + 3 * idx % 60, 21 + 7 * idx % 80)
            for idx, kind in zip(range(max(num_requests, NUM_QUESTIONS)), kinds, strict=False)
        )
        return [(render_question(question), params) for question in questions]


TRAFFIC: Mapping[str, Traffic] = {
    "copy": CopyTraffic(checkpoint="copying", speculative=SPECULATIVE),
    "copy_suffix": CopyTraffic(checkpoint="copying", speculative=SUFFIX),
    "copy_draft_model": CopyTraffic(
        checkpoint="copying", speculative=DRAFT_MODEL | {"model": "copying_draft"}
    ),
    "random": Traffic(checkpoint="random", speculative=SPECULATIVE),
    "useless": UselessTraffic(
        checkpoint="random", speculative=SPECULATIVE | {"prompt_lookup_min": 1}
    ),
    "demo_eagle3": DemoTraffic(checkpoint="demo", speculative=EAGLE3 | {"model": "demo_head"}),
    "demo_draft_model": DemoTraffic(
        checkpoint="demo", speculative=DRAFT_MODEL | {"model": "demo_draft"}
    ),
}


def write_copying_checkpoint(folder: Path, shape: ModelShape) -> Path:
    """Writes a model whose next token depends on the last one: tokens form cycles.

    All products are computed as in other models, with zeros in the last product of each part.
    """
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


def write_demo_draft(folder: Path) -> None:
    """Writes the first two layers of the demo model, with its embeddings and its tokenizer."""
    shutil.copytree(CHECKPOINT, folder)
    weights = {
        name: weight_np
        for name, weight_np in load_file(CHECKPOINT / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < 2
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))


def write_checkpoints(folder: Path) -> None:
    """Writes the models of all workloads, and the draft models, into folders of their names."""
    write_copying_checkpoint(folder / "copying", SHAPE)
    write_copying_checkpoint(folder / "copying_draft", DRAFT_SHAPE)
    write_checkpoint(folder / "random", SHAPE)
    shutil.copytree(CHECKPOINT, folder / "demo")
    shutil.copytree(DRAFT_HEAD, folder / "demo_head")
    write_demo_draft(folder / "demo_draft")


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


def run(llm: LLM, requests: Sequence[Request], num_requests: int) -> Run:
    """Answers all requests, in groups of `num_requests` that arrive at the same time."""
    before = llm.get_stats()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    outputs = []
    for start in range(0, len(requests), num_requests):
        group = requests[start : start + num_requests]
        prompts, params = [prompt for prompt, _ in group], [params for _, params in group]
        outputs += llm.generate(prompts, params, use_tqdm=False)
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
    plain: LLM,
    drafting: LLM,
    requests: Sequence[Request],
    *,
    num_requests: int,
    num_repetitions: int,
) -> dict[str, list[float]]:
    """The figures of each repetition, by metric."""
    pairs: list[tuple[Run, Run]] = []
    for idx in range(1 + num_repetitions):
        order = (plain, drafting) if idx % 2 else (drafting, plain)
        runs = {llm: run(llm, requests, num_requests) for llm in order}
        pairs.append((runs[plain], runs[drafting]))
    pairs = pairs[1:]  # without the repetition that warmed up
    figures = [compare(*pair) for pair in pairs]
    found = {metric: [each[metric] for each in figures] for metric in figures[0]}
    plain_s, drafting_s = (sum(each.cpu_s for each in runs) for runs in zip(*pairs, strict=True))
    found["total_times_tokens_per_cpu_s"] = [plain_s / drafting_s]
    return {metric: found[metric] for metric in METRICS}


def measure_workloads(
    folder: Path, names: Sequence[str], num_requests: Sequence[int], num_repetitions: int
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yields the case and the figures of each workload and number of requests.

    Consecutive workloads with the same checkpoint share the engine without drafts.
    """
    settings = {
        "max_model_len": NUM_PROMPT_TOKENS + MAX_OUTPUT_TOKENS,
        "max_num_seqs": max(num_requests),
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
    }
    by_checkpoint = itertools.groupby(names, lambda name: TRAFFIC[name].checkpoint)
    for checkpoint, same in by_checkpoint:
        vocab_size = json.loads((folder / checkpoint / "config.json").read_text())["vocab_size"]
        with LLM(folder / checkpoint, **settings) as plain:
            for name in same:
                speculative = dict(TRAFFIC[name].speculative)
                if "model" in speculative:
                    speculative["model"] = str(folder / speculative["model"])
                with LLM(
                    folder / checkpoint, **settings, speculative_config=speculative
                ) as drafting:
                    for num in num_requests:
                        figures = measure(
                            *(plain, drafting, TRAFFIC[name].requests(num, vocab_size)),
                            num_requests=num,
                            num_repetitions=num_repetitions,
                        )
                        yield f"{name} requests={num}", figures


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
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder))
        for case, figures in measure_workloads(
            *(Path(folder), arguments.workloads, arguments.requests),
            num_repetitions=arguments.repetitions,
        ):
            rows = [
                ResultRow(
                    benchmark=BENCHMARK,
                    case=case,
                    metric=metric,
                    values=values,
                    device=processor_name(),
                )
                for metric, values in figures.items()
            ]
            if arguments.out is not None:
                append_rows(rows, arguments.out)
            lines.append([case, *(spread(row.values) for row in rows)])
    print(markdown_table(["case", *METRICS], lines))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
