"""Experiments that train small models, for minutes to an hour."""
