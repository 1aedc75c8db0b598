"""One attention call, from what was asked to what comes back."""
