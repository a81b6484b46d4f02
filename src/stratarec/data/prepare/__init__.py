"""Preparation of a data set from raw logs."""
