"""`python -m quire` is the command line."""

from __future__ import annotations

from quire.cli import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    run()
