"""The HTTP server: routes of OpenAI's and Anthropic's APIs, without JAX."""
