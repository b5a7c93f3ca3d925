"""Conversion between text and token ids: tokenizer, detokenizer, chat templates, parsers."""
