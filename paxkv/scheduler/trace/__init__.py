"""Record and replay: every call that a scheduler gets, what it answered, and the same again."""
