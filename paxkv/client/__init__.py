"""Talks to an engine through messages; turns prompts into requests and tokens into text."""
