"""Metrics and the statistics log."""
