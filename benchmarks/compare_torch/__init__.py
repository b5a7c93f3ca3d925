"""Compares paxkv with torch and transformers on the same workloads."""
