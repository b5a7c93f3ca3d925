"""Llama (1 to 3.2, text only) and Mistral (with full attention)."""

from models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """The shared decoder as it is; biases only where config.json asks for them."""


class MistralForCausalLM(DecoderForCausalLM):
    """The same network as Llama, never with biases; its sliding window is refused by the config."""
