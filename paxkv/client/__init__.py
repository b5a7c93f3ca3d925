"""Clients of an engine: turn prompts into requests, and tokens into text."""
