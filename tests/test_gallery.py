"""The gallery is the one in docs/, its functions are what Quire computes, and its variants are what it says."""

from __future__ import annotations

import pytest
import torch

import gallery
import quire
from quire.kernels.expressions import tree
from quire.kernels.expressions.dependencies import Capturing, Setting
from quire.kernels.expressions.variant import read_text

LEN = gallery.LEN


def test_the_documents_are_fresh() -> None:
    for path, text in gallery.files().items():
        assert path.exists() and path.read_text(encoding="utf-8") == text, f"{path.name}: run python tests/gallery.py"
    pictures = {path.name for path in gallery.PICTURES.glob("mask-*.svg")}
    assert pictures == {f"mask-{entry.name}.svg" for entry in gallery.ENTRIES}


@pytest.mark.parametrize("entry", gallery.ENTRIES, ids=lambda entry: entry.name)
def test_pictures_are_what_kernels_compute(entry) -> None:
    """The recorded operations, in float64, give the shades of the picture."""
    names = gallery.functions(entry)
    tracer = Capturing(Setting(LEN, LEN, torch.device("cpu")))
    expression = read_text(tracer.text_of(names.get("score_mod"), names.get("mask_mod")))
    scores = torch.linspace(-60, 60, LEN).expand(8, LEN, LEN).double() * (entry.name == "cap")
    found = tree.evaluate(expression, scores, 0, tracer.captured)["mask_mod" in names]
    shades = gallery.drawn(entry)
    if "mask_mod" in names:
        assert torch.equal(found[gallery.HEAD].float(), shades) and 0 < shades.mean() < 1
    else:
        seen = shades > 0
        low, high = found[gallery.HEAD][seen].aminmax()
        torch.testing.assert_close(0.1 + 0.9 * (found[gallery.HEAD][seen] - low) / (high - low), shades[seen].double())


def test_the_variants_exist_and_speeds_are_those_of_the_results() -> None:
    measured = gallery.results()
    rows = {row["name"] for row in measured["rows"]}
    for entry in gallery.ENTRIES:
        assert not entry.variant or isinstance(getattr(quire.variants, entry.variant), quire.Variant)
        assert not entry.row or f"prefill: {entry.row}" in rows
    window = next(entry for entry in gallery.ENTRIES if entry.name == "sliding")
    us = {row["name"]: row["us"] for row in measured["rows"]}
    assert f"{us['prefill: flex: window 1024']:,.0f} µs" in gallery.speed(window, measured)
