"""Stores: the homes of rows outside level 0."""
