"""Llama (1 to 3.2, text only) and Mistral (with or without a sliding window)."""

from models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """The shared decoder as it is; biases only where config.json asks for them."""


class MistralForCausalLM(DecoderForCausalLM):
    """The same network as Llama, never with biases; a window, if any, is of every layer."""
