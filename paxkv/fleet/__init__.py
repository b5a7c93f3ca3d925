"""Engine processes: start, supervise, replace and combine them."""
