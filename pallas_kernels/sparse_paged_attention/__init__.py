"""The op `sparse_paged_attention`: attention to chosen tokens only."""
