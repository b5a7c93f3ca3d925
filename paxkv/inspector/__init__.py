"""The inspector: a page that shows the paged cache at work, and what feeds it."""
