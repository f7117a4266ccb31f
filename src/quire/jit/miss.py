"""Why a variant is not in the cache: how the nearest entry differs, as the user spells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from quire.jit.manifest import Manifest
from quire.jit.request import Request


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """The labels under which two mappings differ: those of the new one in order, then those of the old one alone."""
    labels = [*new, *(label for label in old if label not in new)]
    return [label for label in labels if old.get(label) != new.get(label)]


def _common_prefix(one: str, other: str) -> int:
    """How many characters two names have in common at their start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _name_part(label: str, old: str, new: str) -> str:
    """How one part of an entry's name differs; "" if it does not."""
    if label.startswith("header "):
        return f"{label} {'changed' if old and new else 'was added' if new else 'was removed'}"
    if label == "source":
        return "variant.jinja changed, or the values that it is given"
    if label == "flags":
        gone = [word for word in old.split() if word not in new.split()]
        came = [word for word in new.split() if word not in old.split()]
        return f"flags changed: {' '.join(gone) or 'nothing'} -> {' '.join(came) or 'nothing'}"
    if label == "version":
        lines = zip_longest(new.splitlines(), old.splitlines(), fillvalue="nothing")
        here, there = next(((a, b) for a, b in lines if a != b), (new, old))
        return f"the compiler is {here}, the cache has {there}"
    return f"{label} is {new!r}, the cache has {old!r}"


def _name_parts(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [_name_part(label, str(old.get(label, "")), new.get(label, "")) for label in _changed(old, new)]


def _first(reasons: list[str]) -> str:
    return "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")


def _same_variant(request: Request, manifest: Manifest, toolchain: Mapping[str, str] | None) -> str:
    """Why the entry of the same slug cannot be used."""
    reasons = _name_parts(manifest.request, request.parts)
    if not reasons and toolchain is not None:
        reasons = _name_parts(manifest.toolchain, toolchain)
    return _first(reasons) or "the entry in the cache is damaged or not to be trusted"


def _kernel(slug: str) -> str:
    return slug.partition(".")[0]


def by_nearness(slug: str, slugs: Iterable[str]) -> list[str]:
    """Those of `slugs` with the same kernel as `slug`, those that differ in the fewest words first."""

    def distance(other: str) -> tuple[int, int, str]:
        words = zip_longest(slug.split("."), other.split("."))
        return sum(a != b for a, b in words), -_common_prefix(other, slug), other

    return sorted((other for other in slugs if _kernel(other) == _kernel(slug)), key=distance)


def _short(fields: Mapping[str, str]) -> dict[str, str]:
    """The fields without texts of several lines, whose digests are fields, too."""
    return {name: value for name, value in fields.items() if "\n" not in value}


def explain(request: Request, manifests: Sequence[Manifest], toolchain: Mapping[str, str] | None) -> str:
    """One line. `manifests`: those of the nearest slug; `toolchain`: the second half of the name of a build."""
    spec = request.spec
    if not manifests:
        return f"the cache has no variant of {_kernel(spec.slug)}"
    if manifests[0].slug == spec.slug:
        closest = min(manifests, key=lambda m: (len(_changed(m.request, request.parts)), -m.created))
        return _same_variant(request, closest, toolchain)
    fields, old = ({"target": one.target, **_short(dict(one.fields))} for one in (spec, manifests[0]))
    reasons = [f"{name}={fields.get(name, 'unset')}, not {old.get(name, 'unset')}" for name in _changed(old, fields)]
    words = zip_longest(
        spec.slug.split("."), manifests[0].slug.split("."), fillvalue="nothing"
    )  # kernels without fields
    return f"nearest is {manifests[0].slug}: {_first(reasons or [f'{a}, not {b}' for a, b in words if a != b])}"
