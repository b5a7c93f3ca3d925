"""llama.cpp through the low-level functions of llama-cpp-python, in this process."""

import os
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

from benchmarks.compare_cpu.greedy_model import MAX_MODEL_LEN, MAX_STREAMS, GreedyModel


class LlamaCppModel(GreedyModel):
    """Implements `GreedyModel`. Except sizes and threads, all settings are llama.cpp's defaults.

    Args:
        file: A GGUF file.
    """

    def __init__(self, file: Path) -> None:
        # llama.cpp's log is long, and the results of its functions show errors.
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        if not model:
            raise ValueError(f"llama.cpp cannot load {file}.")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = MAX_STREAMS * MAX_MODEL_LEN
        params.n_seq_max = MAX_STREAMS
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise ValueError("llama.cpp cannot make a context.")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(MAX_STREAMS * MAX_MODEL_LEN, 0, 1)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """See `GreedyModel.generate`."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        answers: list[list[int]] = [[] for _ in prompts]
        new, start = [list(prompt) for prompt in prompts], 0
        for _ in range(num_tokens):
            tokens = self._step(new, start)
            start += len(new[0])
            new = [[token] for token in tokens]
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
        return answers

    def _step(self, new: Sequence[Sequence[int]], start: int) -> list[int]:
        """Computes new tokens, the same number for each stream; returns the tokens after them.

        Args:
            start: Position of the first new token.
        """
        batch, rows = self._batch, []
        batch.n_tokens = 0
        for stream, tokens in enumerate(new):
            for position, token in enumerate(tokens, start):
                row = batch.n_tokens
                batch.token[row], batch.pos[row] = token, position
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, stream
                batch.logits[row] = position == start + len(tokens) - 1
                batch.n_tokens += 1
            rows.append(batch.n_tokens - 1)
        if code := llama_cpp.llama_decode(self._context, batch):
            raise ValueError(f"llama_decode returned {code}.")
        return [
            int(
                np.ctypeslib.as_array(
                    llama_cpp.llama_get_logits_ith(self._context, row), (self._vocab_size,)
                ).argmax()
            )
            for row in rows
        ]

    def versions(self) -> dict[str, str]:
        """See `GreedyModel.versions`."""
        return {"llama_cpp_python": llama_cpp.__version__}
