"""Load on an OpenAI-compatible server over HTTP, and what its clients see of it."""
