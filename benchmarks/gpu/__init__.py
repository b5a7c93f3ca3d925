"""Checks and measures paxkv on one GPU: kernels, the demo model, and large models."""
