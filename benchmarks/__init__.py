"""Benchmarks: check correctness, time this library and its peers in alternation, and write a result
file.

Terms: a *peer* is another library. A *contender* or *side* is one of the programs that are
compared. A *gate* checks that all contenders compute the same, before they are timed. A *cell* is
one combination of settings; its results are a *row* of the printed table.
"""
