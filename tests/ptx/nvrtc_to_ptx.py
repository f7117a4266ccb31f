"""nvrtc_worker.py with PTX for its artifact: `python nvrtc_to_ptx.py WORKER ...`, and the worker's own arguments."""

from __future__ import annotations

import ctypes
import importlib.util
import sys


def main() -> int:
    """As the worker's."""
    spec = importlib.util.spec_from_file_location("nvrtc_worker", sys.argv[1])
    assert spec is not None and spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)

    class ToPtx(worker.Nvrtc):  # type: ignore[name-defined, misc]
        def read(self, what: str, program: ctypes.c_void_p) -> bytes:
            return bytes(super().read("PTX" if what == "CUBIN" else what, program))

    library, *words = sys.argv[2:]
    loaded = ToPtx(library)
    return int(worker.version(loaded) if words == ["--version"] else worker.build(loaded, *words))


if __name__ == "__main__":
    sys.exit(main())
