"""Grammars for the tokens of requests: compiled in threads, applied as bitmasks."""
