"""Conformance suites that every implementation of a protocol subclasses; imported by tests alone."""
