"""Batches of samples and their jagged id lists, used by the packages above this one."""
