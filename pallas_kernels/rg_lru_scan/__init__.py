"""The recurrence of real-gated linear recurrent units, with one decay per channel."""
