"""Builds the documentation site: ``bash scripts/docs.sh``."""
