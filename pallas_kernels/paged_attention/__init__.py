"""The op `paged_attention`: ragged causal attention over a paged KV cache."""
