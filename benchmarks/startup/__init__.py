"""How long a server takes to its first token, and what it costs; see `__main__.py`."""
