"""The one place where raw values get their types, for logs, frames, single rows and the estimator.

`converter` turns the raw columns of a log or frame into typed columns and names the file and row of a bad value.
`text_values` reads integers, times and lists from text. `frames` reads DataFrames, mappings and Python objects.
"""
