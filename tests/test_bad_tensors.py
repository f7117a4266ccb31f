"""Calls of every public function with one tensor changed as callers do by mistake, each between guard pages.

fuzz.py also compares with the oracle, and changes numbers and words; it does not know all functions.
"""

from __future__ import annotations

import random

import pytest

import quire
from guard import GuardedMemory
from isolation import isolated
from mutations import mutate
from public_calls import CALLS

CALL = {repr(call): call for call in CALLS}


@isolated(seconds=120)
def change(name: str, times: int) -> None:
    call = CALL[name]
    for number in range(times):
        source = random.Random(f"{name}:{number}")
        tensors = call.make()
        changed = source.choice(sorted(tensors))
        what, tensors[changed] = mutate(source, changed, tensors[changed])
        memory = GuardedMemory(upper=number % 2 == 0)
        for other, tensor in tensors.items():
            if other != changed:
                tensors[other] = memory.place(other, tensor)
        try:
            call(tensors)
        except quire.QuireError:
            pass
        except Exception as error:
            raise AssertionError(f"{changed}: {what}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in CALL])
def test_changed_tensors_are_refused_or_taken(name: str) -> None:
    change(name, 20)
