"""Formats: what a page of the KV cache holds. A page is one device's part of a block of one row."""
