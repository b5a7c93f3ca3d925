"""Grammars that bind the tokens of requests: compiled beside the steps, applied as bitmasks."""
