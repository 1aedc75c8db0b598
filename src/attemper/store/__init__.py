"""Runs on disk: every head over the whole run, in files of SQLite. Without torch."""
