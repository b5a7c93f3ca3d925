"""Batch files in OpenAI's format: one request per line, answered by the server's routes."""
