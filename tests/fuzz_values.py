"""Random calls of all callables on the CPU, compared with float64: most valid, a quarter with one or two mistakes.

    python tests/fuzz.py --values --calls 20000 --seed 1
    python tests/fuzz.py --values --call 1:417          one call again, with its arguments

The frame is fuzz.py's. A reference is plain torch on the arguments that were really passed, and imports nothing of
Quire; errors are held to the rule of the suite (oracle.assert_close). A call with a mistake is refused by one of
Quire's errors, or gives the right numbers for what was passed.
"""

from __future__ import annotations

import choice_cases
import compat_cases
import fuzz_calls
import latent_cases
import table_cases
import wrapper_cases
from fuzz_calls import Generators

VALUES = Generators(
    (
        *fuzz_calls.GENERATORS, *wrapper_cases.CASES, *table_cases.CASES, *latent_cases.CASES, *compat_cases.CASES,
        *choice_cases.CASES,
    ),
    good_chance=0.75, seconds=20.0,
)  # fmt: skip
