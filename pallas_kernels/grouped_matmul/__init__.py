"""The op `grouped_matmul`: multiplies each tile of rows with the matrix of its group."""
