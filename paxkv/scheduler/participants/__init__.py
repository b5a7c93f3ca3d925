"""Scheduling rules of single features: forks, encoder inputs, remote KV, spare blocks."""
