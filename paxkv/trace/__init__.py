"""Writes, reads and replays traces of scheduler calls."""
