"""What starts an engine or a server: build functions, processes, and the command line."""
