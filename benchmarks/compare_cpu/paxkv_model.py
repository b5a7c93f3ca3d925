"""paxkv, in this process."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare_cpu.greedy_model import MAX_MODEL_LEN, MAX_STREAMS, GreedyModel
from paxkv import LLM, SamplingParams


class PaxkvModel(GreedyModel):
    """Implements `GreedyModel`.

    Args:
        folder: The checkpoint.
        weights: "float32", or a value of `--quantization`.
    """

    def __init__(self, folder: Path, weights: str) -> None:
        self._llm = LLM(
            folder,
            quantization="none" if weights == "float32" else weights,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_STREAMS,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """See `GreedyModel.generate`."""
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        outputs = self._llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def versions(self) -> dict[str, str]:
        """See `GreedyModel.versions`."""
        return {name: importlib.metadata.version(name) for name in ("paxkv", "jax")}
