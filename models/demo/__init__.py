"""The embedded demo checkpoint and what made it: data, tokenizer, training, evaluation."""
