"""Anthropic's API: request and response bodies of `/v1/messages`."""
