"""The op `scaled_grouped_matmul`: multiplies tiles of rows with matrices of small numbers."""
