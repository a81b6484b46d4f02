"""Batches of samples and their jagged id lists, used by all rooms above."""
