"""What may make two runs differ, a function each, from a compared site to what it finds there."""
