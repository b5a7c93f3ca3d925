"""Speed and memory, measured as ratios in one run; each benchmark is one command."""
