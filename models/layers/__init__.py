"""The building blocks of a decoder."""
