"""The op `merge_attention_states`: attention over two sets of keys into one over both."""
