"""Which class runs which architecture of a config.json."""

from models.decoder import DecoderForCausalLM
from models.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM
from models.llama import LlamaForCausalLM, MistralForCausalLM
from models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM

# The same names as `FAMILY_TRAITS` in models/family_traits.py, which refuses all others.
MODEL_CLASSES: dict[str, type[DecoderForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
}
