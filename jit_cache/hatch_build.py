"""A build hook: refuses a wheel without prebuilt variants, and names the platform if their host code is for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: How the targets of a machine's host code begin.
HOST_TARGETS = {"x86_64": ("x86-64",), "aarch64": ("aarch64",)}


class PrebuiltEntries(BuildHookInterface):
    """Looks at the store before it is packed."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # the store may come later
            return
        store = Path(self.root) / "src" / "quire_jit_cache" / "store"
        manifests = sorted(store.glob("entries/*/*/manifest.json"))
        if not manifests:
            raise FileNotFoundError(f"{store} holds no entries; run `python jit_cache/prebuild.py` first")
        targets = {json.loads(path.read_text(encoding="utf-8"))["target"] for path in manifests}
        known = ("sm", *(start for starts in HOST_TARGETS.values() for start in starts))
        foreign = sorted(target for target in targets if not target.startswith(known))
        if foreign:
            raise ValueError(f"{store} holds entries for {', '.join(foreign)}, which other machines cannot run")
        machines = [name for name, starts in HOST_TARGETS.items() if any(t.startswith(starts) for t in targets)]
        # With host code for one kind of machine the wheel is for that kind; with none or both it serves all.
        build_data["tag"] = f"py3-none-{f'linux_{machines[0]}' if len(machines) == 1 else 'any'}"
        build_data["pure_python"] = len(machines) != 1
