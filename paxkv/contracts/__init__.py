"""Frozen dataclasses and Protocols that cross a boundary between layers."""
