"""Prepares JSON schemas for llguidance: removes and reports keywords that it cannot enforce."""
