"""Layers around every route."""
