"""The inspector: a web page that shows the KV cache of a running engine, and its data sources."""
