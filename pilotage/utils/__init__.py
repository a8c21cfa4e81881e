"""Documented import paths that live elsewhere."""
