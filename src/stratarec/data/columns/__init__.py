"""Conversion of raw values to typed columns, for logs, frames, single rows and the estimator.

`converter` converts the raw columns of a log or frame to typed columns; its errors name file and
row of a bad value. `text_values` reads integers, times and lists from text. `dates` computes
numbers from dates. `frames` reads DataFrames, mappings and Python objects.
"""
