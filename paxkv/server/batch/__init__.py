"""Batch files in OpenAI's format: a request a line, answered by the routes of the server."""
