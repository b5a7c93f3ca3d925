"""Offline throughput of engines, each in a process of its own."""
