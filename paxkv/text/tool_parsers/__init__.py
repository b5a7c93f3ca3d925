"""Parsers that find the calls of tools in what a model writes, as it comes."""
