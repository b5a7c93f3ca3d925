"""Step features: what a step computes besides the next tokens."""
