"""Streaming parsers that find tool calls in a model's answer."""
