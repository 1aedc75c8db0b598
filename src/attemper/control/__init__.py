"""Acting on models: what was measured is tempered."""
