"""Runs GPU measurements as small units, each group of units in a process that may die."""
