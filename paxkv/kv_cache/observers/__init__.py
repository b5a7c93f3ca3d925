"""Observers of the block pool."""
