"""Scoring with an exported model: the manifest and files of an export, and `Scorer`, which needs
only these files.
"""
