"""Decoders that several families derive from, and the loops that run their layers."""
