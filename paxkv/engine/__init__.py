"""The step loop: the only layer that knows both the scheduler and whoever computes."""
