"""The op `merge_attention_states`: joins attention over two sets of keys."""
