"""Benchmarks: a correctness gate, then ours and the peer in alternation, then a result file."""
