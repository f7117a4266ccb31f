"""Quire in the place of other libraries."""
