"""The op `grouped_matmul`: rows in tiles, each times the matrix of its group."""
