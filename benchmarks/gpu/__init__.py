"""Whole models on one GPU, paxkv beside transformers, with random weights."""
