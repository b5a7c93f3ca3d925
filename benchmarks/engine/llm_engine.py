"""paxkv's `LLM.generate` as an offline engine: the door that a Python program goes through."""

from benchmarks.engine.offline_engine import EngineOutput, EngineSpec
from benchmarks.engine.paxkv_engine import kv_cache_bytes
from benchmarks.workloads import Workload
from paxkv import LLM, SamplingParams


def load_engine(spec: EngineSpec, workload: Workload) -> "LLMEngine":
    """Builds it; settings are those of `paxkv_engine`, and so is the size of the cache.

    Raises:
        ConfigError: There is no setting of that name, or a value cannot work.
    """
    num_bytes = kv_cache_bytes(spec, workload, spec.settings)
    settings = {"cpu_kv_cache_bytes": num_bytes} | spec.settings
    return LLMEngine(LLM(spec.checkpoint, dtype=spec.dtype, **settings))


class LLMEngine:
    """An `LLM` that answers with tokens, and makes no text of them."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def prepare(self) -> None:
        """Forgets cached prefixes."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: requests still hold blocks.")

    def run(self, workload: Workload) -> EngineOutput:
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=request.num_output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for request in workload.requests
        ]
        prompts = [request.prompt_token_ids for request in workload.requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return EngineOutput(token_ids=[output.outputs[0].token_ids for output in outputs])

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        raise NotImplementedError("paxkv reports no logits; another engine judges.")

    def close(self) -> None:
        self._llm.close()
