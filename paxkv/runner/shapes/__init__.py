"""What all folders of the runner read: shapes of programs, the buffer of a step, its requests."""
