"""Shapes and layouts that every other folder of the runner uses."""
