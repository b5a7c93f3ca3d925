"""Starts engines and servers: build functions, engine processes, and the command line."""
