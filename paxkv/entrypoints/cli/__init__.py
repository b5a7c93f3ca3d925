"""The `paxkv` command."""
