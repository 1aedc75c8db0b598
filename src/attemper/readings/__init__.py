"""What was read, without torch."""
