"""A run that goes on: with each period of a log, one after another."""
