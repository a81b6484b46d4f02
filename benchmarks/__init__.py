"""Benchmarks: check correctness, time this library and its peers in alternation, and write a result file."""
