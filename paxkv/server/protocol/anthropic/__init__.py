"""Anthropic's API: what `/v1/messages` reads and answers."""
