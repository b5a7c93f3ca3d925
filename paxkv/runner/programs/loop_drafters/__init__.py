"""Drafters that run on the device, inside the loop of `drafting_loop.py`."""
