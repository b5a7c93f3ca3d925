"""JSON schemas are made ready for llguidance: what it cannot enforce is left out and reported."""
