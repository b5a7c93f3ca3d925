"""Runs GPU measurements as small units, in groups. Each group has a process, which may crash."""
