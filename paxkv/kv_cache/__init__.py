"""Host side of the paged KV cache: assigns blocks of KV memory to the tokens of requests."""
