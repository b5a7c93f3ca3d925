"""The `paxkv` command: one program with subcommands, and how command lines are read."""
