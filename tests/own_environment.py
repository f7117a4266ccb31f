"""Import this before torch and Quire: Quire's cache is then one of the checkout's own, and threads that wait sleep.

The cache stays between runs, so that a second one compiles nothing; `make clean` empties it. Entries are named by all
that they were made from: one of an older run never stands in for changed code. Subprocesses inherit both.
TESTS_CACHE_DIR names another directory, for runs with another compiler. TESTS_DAY is a number: tests that take turns
from day to day (tests/covering.py) run as on that day.
"""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

CACHE = Path(os.environ.get("TESTS_CACHE_DIR") or Path(__file__).resolve().parent.parent / "build" / "tests")

os.environ["QUIRE_CACHE_DIR"] = str(CACHE)
CACHE.mkdir(parents=True, exist_ok=True)
os.environ["XDG_RUNTIME_DIR"] = str(CACHE)  # so are build permits: compilers of other checkouts are not waited for
# OpenMP's threads would spin while they wait, and take the processors from those they wait for: tests run side by side.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Which of the tests of all days run: processes that share them have one day, also around midnight.
os.environ.setdefault("TESTS_DAY", str(date.today().toordinal()))
for name in ("QUIRE_JIT", "QUIRE_RECORD"):  # those of the user's session are not the suite's
    os.environ.pop(name, None)
