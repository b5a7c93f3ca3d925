"""paxkv: serves language models from JAX with a paged, prefix-cached KV cache."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
    from paxkv.config.structured_outputs_params import StructuredOutputsParams
    from paxkv.contracts.request_output import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        RequestOutput,
    )
    from paxkv.generate import CompiledGenerator
    from paxkv.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompiledGenerator",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

# Resolved on first use, so that `import paxkv` alone stays free of JAX, and next to nothing comes
# before a command can answer a signal.
_LATE = {
    "LLM": "paxkv.llm",
    "CompiledGenerator": "paxkv.generate",
    "BeamSearchOutput": "paxkv.contracts.request_output",
    "BeamSearchSequence": "paxkv.contracts.request_output",
    "CompletionOutput": "paxkv.contracts.request_output",
    "RequestOutput": "paxkv.contracts.request_output",
    "BeamSearchParams": "paxkv.config.sampling_params",
    "SamplingParams": "paxkv.config.sampling_params",
    "StructuredOutputsParams": "paxkv.config.structured_outputs_params",
}


def __getattr__(name: str) -> object:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'paxkv' has no attribute {name!r}")
