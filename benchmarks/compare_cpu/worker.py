"""The process of one program: loads the model, measures it, and prints a line of JSON.

    python -m benchmarks.compare_cpu.worker PROGRAM MODEL WEIGHTS VOCAB_SIZE REPETITIONS

MODEL is the checkpoint's folder, or a GGUF file. `__main__.py` starts this module in the program's
own environment, which may lack paxkv.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path

from benchmarks.compare_cpu.greedy_model import GreedyModel, first_tokens, measure, peak_mib


def load(program: str, path: Path, weights: str) -> GreedyModel:
    """Imports a program, which may not be installed, and loads the model."""
    module = importlib.import_module(f"benchmarks.compare_cpu.{program}_model")
    if program == "llama_cpp":
        return module.LlamaCppModel(path)
    return (module.PaxkvModel if program == "paxkv" else module.VllmModel)(path, weights)


def main(program: str, path: str, weights: str, vocab_size: int, num_repetitions: int) -> None:
    # Libraries print to stdout too; the parent reads only the answer there.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        start = time.perf_counter()
        model = load(program, Path(path), weights)
        figures = {"start_s": [time.perf_counter() - start]}
        tokens = first_tokens(model, vocab_size=vocab_size)
        figures |= measure(model, vocab_size=vocab_size, num_repetitions=num_repetitions)
        figures["peak_mib"] = [peak_mib()]
        made = {"figures": figures, "first_tokens": tokens, "versions": model.versions()}
        answer.write(json.dumps(made) + "\n")
        answer.flush()
        # Some programs' threads keep the interpreter from ending.
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:6]))
