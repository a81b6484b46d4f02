"""Batches from a prepared data set."""
