"""vLLM built for CPUs, in this process."""

import os
from collections.abc import Sequence
from pathlib import Path

# vLLM runs in this process, so that its CPU time and memory are measured. As in the other programs,
# threads are not pinned.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm

from benchmarks.compare_cpu.greedy_model import MAX_MODEL_LEN, MAX_STREAMS, GreedyModel


class VllmModel(GreedyModel):
    """Implements `GreedyModel`. Prefixes are not reused; see `compare_cpu/__main__.py`.

    Args:
        folder: The checkpoint.
        weights: The dtype.
    """

    def __init__(self, folder: Path, weights: str) -> None:
        self._llm = vllm.LLM(
            str(folder),
            dtype=weights,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_STREAMS,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """See `GreedyModel.generate`."""
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def versions(self) -> dict[str, str]:
        """See `GreedyModel.versions`."""
        return {"vllm": vllm.__version__}
