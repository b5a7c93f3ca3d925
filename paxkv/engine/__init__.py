"""The step loop: the only layer that calls both the scheduler and the executor."""
