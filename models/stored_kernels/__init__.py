"""How the kernels of products are stored: one class for each encoding."""
