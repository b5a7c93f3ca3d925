"""The HTTP door: OpenAI-compatible routes and server-sent events, without JAX."""
