"""Ids out to their owners, rows back."""
