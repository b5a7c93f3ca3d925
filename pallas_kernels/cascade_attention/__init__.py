"""The op `cascade_attention`: paged attention that reads a batch's common prefix once."""
