"""A checkpoint loaded by transformers, for both its ways to generate and to judge differences."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.engine.offline_engine import EngineSpec

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_transformers_model(spec: EngineSpec) -> PreTrainedModel:
    """The model on the CPU, with as many threads as the engine may use."""
    torch.set_num_threads(spec.num_threads)
    model = AutoModelForCausalLM.from_pretrained(spec.checkpoint, dtype=TORCH_DTYPES[spec.dtype])
    # Outputs have the lengths that the workload says.
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.inference_mode()
def logit_gap(model: PreTrainedModel, token_ids: list[int], first: int, second: int) -> float:
    """Logit of `first` minus that of `second` after `token_ids`, computed alone and at once."""
    logits = model(torch.tensor([token_ids]), logits_to_keep=1).logits[0, -1]
    return float(logits[first] - logits[second])
