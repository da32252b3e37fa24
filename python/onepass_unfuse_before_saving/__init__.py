"""Loads pickled fused models. Its name is the advice in Python's error where onepass is not installed."""

from onepass._swap import new, new_fused

__all__ = ["new", "new_fused"]
