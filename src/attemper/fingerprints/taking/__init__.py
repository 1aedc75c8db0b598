"""Taking fingerprints: from a model while it runs, or from what an engine saved. Needs torch."""
