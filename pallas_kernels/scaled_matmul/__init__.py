"""The op `scaled_matmul`: multiplies rows with a matrix of small numbers with scales."""
