"""One file for each family of models: its config.json, its layers, its weights."""
