"""A checkpoint loaded by transformers, for both of its engines."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.engine.offline_engine import EngineSpec

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_transformers_model(spec: EngineSpec) -> PreTrainedModel:
    """The model on the CPU, with the threads of the spec."""
    torch.set_num_threads(spec.num_threads)
    model = AutoModelForCausalLM.from_pretrained(spec.checkpoint, dtype=TORCH_DTYPES[spec.dtype])
    # The workload sets the output lengths.
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.inference_mode()
def logit_gap(model: PreTrainedModel, token_ids: list[int], first: int, second: int) -> float:
    """Logit of `first` minus logit of `second` after `token_ids`, in one forward pass."""
    logits = model(torch.tensor([token_ids]), logits_to_keep=1).logits[0, -1]
    return float(logits[first] - logits[second])
