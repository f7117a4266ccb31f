"""Name what made a miss: the part of the key in which the nearest entry differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from quire.jit.request import Request
from quire.jit.store import Manifest

__all__ = ["explain"]


def _changed(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """The labels under which two mappings differ, in order of the new one, then what only the old one has."""
    labels = [*new, *(label for label in old if label not in new)]
    return [label for label in labels if old.get(label) != new.get(label)]


def _shared(one: str, other: str) -> int:
    """How many characters two names have in common at their start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _name_part(label: str, old: Mapping[str, str], new: Mapping[str, str]) -> str:
    if label.startswith("header "):
        name = label.removeprefix("header ")
        if label not in old:
            return f"header {name} was added"
        return f"header {name} changed" if label in new else f"header {name} was removed"
    if label == "source":
        return "the template or its values changed"
    if label == "flags":
        before, after = old.get(label, "").split(), new.get(label, "").split()
        gone = [word for word in before if word not in after]
        came = [word for word in after if word not in before]
        return f"flags changed: {' '.join(gone) or 'nothing'} -> {' '.join(came) or 'nothing'}"
    return f"{label} is {new.get(label)!r}, the cache has {old.get(label)!r}"


def _compilers(now: str, then: str) -> str:
    """Two identities, told apart by their first line that differs."""
    lines = zip_longest(now.splitlines(), then.splitlines(), fillvalue="nothing")
    here, there = next(((a, b) for a, b in lines if a != b), (now, then))
    return f"the compiler is {here}, the cache has {there}"


def _same_slug(request: Request, manifest: Manifest, compiler: str | None) -> str:
    changed = _changed(manifest.parts, request.parts)
    reasons = [_name_part(label, manifest.parts, request.parts) for label in changed]
    if not reasons and compiler is not None and compiler != manifest.compiler:
        reasons = [_compilers(compiler, manifest.compiler)]
    if not reasons:
        return "the entry in the cache is damaged or not to be trusted"
    return "; ".join(reasons[:4]) + (f" and {len(reasons) - 4} more" if len(reasons) > 4 else "")


def explain(request: Request, manifests: Sequence[Manifest], compiler: str | None) -> str:
    """One line. `manifests`: of all entries in reach; `compiler`: the identity that a build would use, if known."""
    spec = request.spec
    twins = [manifest for manifest in manifests if manifest.slug == spec.slug]
    if twins:
        nearest = min(twins, key=lambda m: (len(_changed(m.parts, request.parts)), -m.created))
        return _same_slug(request, nearest, compiler)
    if not manifests:
        return "the cache is empty"
    fields = spec.fields()
    kin = [manifest for manifest in manifests if manifest.fields.get("kernel") == spec.kernel]
    if not kin:
        return f"the cache has nothing of the kernel {spec.kernel}"
    nearest = min(kin, key=lambda m: (len(_changed(m.fields, fields)), -_shared(m.slug, spec.slug), m.slug))
    reasons = [
        f"{label} is {fields.get(label)}, not {nearest.fields.get(label)}" for label in _changed(nearest.fields, fields)
    ]
    return f"nearest is {nearest.slug}: {', '.join(reasons[:4]) or 'only its name differs'}"
