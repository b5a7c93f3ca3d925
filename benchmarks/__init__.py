"""Benchmarks of speed and memory; each answers one question with one command."""
