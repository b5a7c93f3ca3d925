"""Traces of scheduler calls: written, read, replayed."""
