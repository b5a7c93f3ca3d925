"""Drafters: propose the next tokens of requests, for steps to verify."""
