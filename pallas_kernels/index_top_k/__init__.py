"""The op `index_top_k`: the tokens that index attention attends to."""
