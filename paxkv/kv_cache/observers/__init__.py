"""What watches the block pool."""
