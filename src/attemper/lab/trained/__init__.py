"""Training of small models: the experiment on collapse, the demo, and what both and ``research/`` share."""
