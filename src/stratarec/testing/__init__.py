"""Conformance suites that every implementation of an interface passes; imported by tests alone."""
