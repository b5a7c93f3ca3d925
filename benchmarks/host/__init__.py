"""Benchmarks of the host half: scheduling and KV block management, without a device."""
