"""A build hook: refuses a wheel without prebuilt variants, and names the platform if there is host code among them."""

from __future__ import annotations

import json
import platform
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
        foreign = sorted(
            target for target in targets if not target.startswith(("sm", *HOST_TARGETS[platform.machine()]))
        )
        if foreign:
            raise ValueError(f"{store} holds entries for {', '.join(foreign)}, which {platform.machine()} cannot run")
        host_code = any(not target.startswith("sm") for target in targets)
        build_data["tag"] = f"py3-none-{f'linux_{platform.machine()}' if host_code else 'any'}"
        build_data["pure_python"] = not host_code
