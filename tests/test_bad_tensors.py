"""Calls of every public function with one tensor changed as callers do by mistake, each between guard pages.

fuzz.py also compares with the oracle, and changes numbers and words; it does not know all functions.
"""

from __future__ import annotations

import random
import warnings

import pytest
import torch

import quire
from guard import GuardedMemory
from isolation import isolated
from mutations import mutate
from public_calls import CALLS

CALL = {repr(call): call for call in CALLS}


@pytest.mark.parametrize("name", CALL)
@isolated(seconds=120)
@pytest.mark.slow
def test_changed_tensors_are_refused_or_taken(name: str) -> None:
    call = CALL[name]
    for number in range(10):
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


@pytest.mark.parametrize("name", CALL)
@isolated(seconds=120, together=CALL)
def test_nested_tensors_are_refused(name: str) -> None:
    """Each tensor in turn is a nested one: in the whole call, and in a run after a good one.

    torch has no sizes of them, and its own check of a signature ends the process.
    """
    warnings.simplefilter("ignore")  # of torch: nested tensors are a prototype
    call = CALL[name]
    tensors = call.make()
    for changed, tensor in tensors.items():
        wrong = {**tensors, changed: torch.nested.nested_tensor([tensor])}
        with pytest.raises(quire.ValidationError):
            call(wrong)
        if changed not in call.planned:
            run = call.start(tensors)
            run(tensors)
            with pytest.raises(quire.ValidationError):
                run(wrong)
