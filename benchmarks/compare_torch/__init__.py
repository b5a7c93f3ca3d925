"""The same workloads on torch, beside paxkv."""
