"""Qwen2 (also 2.5) and Qwen3, dense."""

from models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The shared decoder with biases on q, k and v, and none on o."""


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The shared decoder with RMS-normed queries and keys, before they are turned."""
