"""Boosted trees of an ensemble: the click rates that they compare, and the sums of their leaves."""

CODES = 1 << 24
"""Codes of values are smaller: float32 represents all whole numbers up to here."""
