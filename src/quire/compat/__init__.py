"""Drop-in replacements for other libraries."""

from __future__ import annotations
