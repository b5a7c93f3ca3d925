"""Text on one side, token ids on the other: tokenizer, detokenizer, chat templates."""
