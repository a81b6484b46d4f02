"""Batches and their jagged id lists, which all rooms above use."""
