"""The configs of models and their attention, and functions that read them from config.json."""
