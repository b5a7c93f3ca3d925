"""Milliseconds of a decode step with several kinds of sampling, compared with a greedy step.

    python -m benchmarks.engine.draws
    python -m benchmarks.engine.draws --requests 1 --repetitions 3 --out FILE

The model has random weights in the shape of Qwen3-0.6B: 28 layers and a vocabulary of 151,936. One
engine in this process runs the cases in turn; in each case, it answers a number of equal prompts. A
repetition generates a short and a long answer; the difference of the two times is the time of
decode steps alone. The program prints these figures, and with --out writes them as rows:

    step_ms        wall time of a step
    times_greedy   the same, divided by that of the greedy case in the same repetition

Cases: greedy; sampled (temperature, top_p and top_k); penalty (repetition_penalty); bias
(logit_bias); allowed (allowed_token_ids); min_tokens; logprobs; grammar (a JSON schema).
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from benchmarks.command_line import output_file, positive_int, run_benchmark
from benchmarks.result_rows import ResultRow, append_rows, processor_name
from benchmarks.startup.shapes import SHAPES, write_shape
from benchmarks.tables import markdown_table, spread
from paxkv import LLM, SamplingParams, StructuredOutputsParams

BENCHMARK = "benchmarks.engine.draws"
NUM_PROMPT_TOKENS = 16
# Tokens of the short and of the long answer.
ANSWER_LENS = (4, 20)
_EOS = "<eos>"
_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 400}},
    "required": ["text"],
    "additionalProperties": False,
}
# For each case, the arguments of `SamplingParams` that differ from the greedy case.
CASES: Mapping[str, Mapping[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "seed": 0},
    "penalty": {"repetition_penalty": 1.1},
    "bias": {"logit_bias": {token_id: -5.0 for token_id in range(300, 350)}},
    "allowed": {"allowed_token_ids": list(range(256, 4096))},
    "min_tokens": {"min_tokens": min(ANSWER_LENS)},
    "logprobs": {"logprobs": 5},
    "grammar": {"structured_outputs": StructuredOutputsParams(json=_SCHEMA)},
}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer in which each token is one byte or a word of several letters."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    words = sorted(byte_level.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    while len(words) < vocab_size - 1:
        idx, word = len(words), ""
        while idx:
            idx, digit = divmod(idx, len(letters))
            word += letters[digit]
        words.append(f"{word}-")
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={word: idx for idx, word in enumerate(words)}, merges=[])
    )
    backend.pre_tokenizer = byte_level(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([_EOS])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _EOS}))


def measure(
    llm: LLM, num_requests: int, num_repetitions: int, answer_lens: tuple[int, int] = ANSWER_LENS
) -> dict[str, list[float]]:
    """Milliseconds of a decode step for each case, one for each repetition."""

    def generate(case: str, num_tokens: int) -> float:
        params = SamplingParams(
            **{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True} | CASES[case]
        )
        prompt = list(range(1000, 1000 + NUM_PROMPT_TOKENS))
        start_s = time.perf_counter()
        outputs = llm.generate([prompt] * num_requests, params, use_tqdm=False)
        took_s = time.perf_counter() - start_s
        made = {len(output.outputs[0].token_ids) for output in outputs}
        if made != {num_tokens}:
            raise RuntimeError(f"{case}: answers have {made} tokens, expected {num_tokens}.")
        return took_s

    step_ms: dict[str, list[float]] = {case: [] for case in CASES}
    # The first repetition warms up.
    for repetition in range(num_repetitions + 1):
        for case, found in step_ms.items():
            short_s, long_s = (generate(case, num_tokens) for num_tokens in answer_lens)
            if repetition:
                found.append(1000 * (long_s - short_s) / (answer_lens[1] - answer_lens[0]))
    return step_ms


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {BENCHMARK}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--requests", type=positive_int, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--repetitions", type=positive_int, default=5, metavar="N")
    parser.add_argument("--out", type=output_file)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = write_shape(Path(name, "model"), arguments.shape)
        write_tokenizer(folder, SHAPES[arguments.shape]["vocab_size"])
        with LLM(
            folder,
            max_model_len=512,
            max_num_seqs=max(arguments.requests),
            enable_prefix_caching=False,
        ) as llm:
            found = {num: measure(llm, num, arguments.repetitions) for num in arguments.requests}
    rows = []
    for num_requests, step_ms in found.items():
        for case, values in step_ms.items():
            ratios = [ms / greedy for ms, greedy in zip(values, step_ms["greedy"], strict=True)]
            for metric, figures in (("step_ms", values), ("times_greedy", ratios)):
                rows.append(
                    ResultRow(
                        benchmark=BENCHMARK,
                        case=f"{case} shape={arguments.shape} requests={num_requests}",
                        metric=metric,
                        values=figures,
                        device=processor_name(),
                    )
                )
    if arguments.out is not None:
        append_rows(rows, arguments.out)
    lines = [
        [of_ms.case, spread(of_ms.values), spread(of_ratio.values)]
        for of_ms, of_ratio in zip(rows[::2], rows[1::2], strict=True)
    ]
    print(markdown_table(["case", "step_ms", "times_greedy"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
