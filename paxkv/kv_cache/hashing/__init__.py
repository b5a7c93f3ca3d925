"""Block hashes."""
