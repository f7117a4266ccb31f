"""The only reader of the process environment. Every knob is read at the moment of use.

Nothing is cached, so a test or a notebook may change a variable at any time. An unknown value raises `ValidationError`
with the accepted spellings. An unset or blank variable means its default.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from quire.errors import ValidationError

#: Variables that change what a compiler generates without changing the key: they are removed from its environment.
_SCRUBBED = (
    "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH", "SOURCE_DATE_EPOCH", "NINJA_STATUS",
)  # fmt: skip

#: PyTorch's names of architecture families, and the targets that each stands for.
_FAMILIES = {"ampere": ("sm80", "sm86"), "ada": ("sm89",), "hopper": ("sm90a",), "blackwell": ("sm100a", "sm120a")}

_ARCH = re.compile(r"(?:sm_?|compute_?)?(?:(\d{1,2})\.(\d)|(\d{2,3}))([af]?)(?:\+ptx|-real|-virtual)?", re.ASCII)


def variables() -> tuple[str, ...]:
    """The names of all knobs: those that this file reads."""
    return tuple(dict.fromkeys(re.findall(r'_read\("(QUIRE_\w+)"\)', Path(__file__).read_text(encoding="utf-8"))))


def unknown_variables() -> tuple[str, ...]:
    """Variables of the environment that look like knobs and are none."""
    return tuple(sorted(name for name in os.environ if name.startswith("QUIRE_") and name not in variables()))


def _read(name: str) -> str | None:
    value = os.environ.get(name, "").strip()
    return value or None


def _invalid(name: str, value: str, expected: str) -> ValidationError:
    return ValidationError(f"{name}: expected {expected}, got {value!r}")


def _path(name: str, value: str) -> Path:
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:  # "~somebody" whom this machine does not know
        raise _invalid(name, value, "a path whose ~ is the home of a known user") from error


def cache_root_is_explicit() -> bool:
    """Whether QUIRE_CACHE_DIR names the root. Other users may then read it, as in an image that root has built."""
    return _read("QUIRE_CACHE_DIR") is not None


def cache_root() -> Path:
    """The absolute path of the directory that holds everything that Quire writes. It is not created here.

    QUIRE_CACHE_DIR, else the user's cache directory, else (a user without a home, as in OpenShift) a directory of this
    user id under the temporary directory.
    """
    explicit = _read("QUIRE_CACHE_DIR")
    if explicit is not None:
        return _path("QUIRE_CACHE_DIR", explicit)
    import platformdirs

    with suppress(RuntimeError):  # how platformdirs tells that there is no home; older releases give "~/..."
        default = Path(platformdirs.user_cache_dir("quire"))
        if default.is_absolute() and default.parts[1] != "~":
            return default
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # no directory can be written: a read-only cache may lie there nevertheless
        temporary = "/tmp"
    return Path(temporary) / f"quire-{os.geteuid()}"


def system_cache() -> Path:
    """QUIRE_SYSTEM_CACHE: a read-only store of the whole machine; /usr/share/quire by default, which need not exist."""
    return _path("QUIRE_SYSTEM_CACHE", _read("QUIRE_SYSTEM_CACHE") or "/usr/share/quire")


def shared_cache() -> str | None:
    """QUIRE_SHARED_CACHE: the URL of the remote cache tier, or None."""
    return _read("QUIRE_SHARED_CACHE")


def shared_cache_is_read_only() -> bool:
    """Whether QUIRE_SHARED_CACHE_MODE=read forbids writing to the remote cache tier."""
    value = (_read("QUIRE_SHARED_CACHE_MODE") or "write").lower()
    if value not in ("read", "write"):
        raise _invalid("QUIRE_SHARED_CACHE_MODE", value, "read or write")
    return value == "read"


def shared_cache_key() -> Path | None:
    """QUIRE_SHARED_CACHE_KEY: the file with the secret that signs objects of the remote cache tier, or None."""
    value = _read("QUIRE_SHARED_CACHE_KEY")
    return None if value is None else _path("QUIRE_SHARED_CACHE_KEY", value)


def trusted_keys() -> Path | None:
    """QUIRE_TRUSTED_KEYS: the file of public keys, one of which must have signed what others made, or None."""
    value = _read("QUIRE_TRUSTED_KEYS")
    return None if value is None else _path("QUIRE_TRUSTED_KEYS", value)


def signing_key() -> Path | None:
    """QUIRE_SIGNING_KEY: the file with the private key that signs what is compiled here, or None."""
    value = _read("QUIRE_SIGNING_KEY")
    return None if value is None else _path("QUIRE_SIGNING_KEY", value)


def shared_cache_is_trusted_unsigned() -> bool:
    """Whether QUIRE_SHARED_CACHE_TRUST=unsigned lets objects of the remote cache tier be used without a signature."""
    value = (_read("QUIRE_SHARED_CACHE_TRUST") or "signed").lower()
    if value not in ("signed", "unsigned"):
        raise _invalid("QUIRE_SHARED_CACHE_TRUST", value, "signed or unsigned")
    return value == "unsigned"


def jit_denied() -> bool:
    """Whether QUIRE_JIT=deny forbids compiling."""
    value = (_read("QUIRE_JIT") or "auto").lower()
    if value not in ("auto", "deny"):
        raise _invalid("QUIRE_JIT", value, "auto or deny")
    return value == "deny"


def parse_arch_list(text: str) -> tuple[str, ...]:
    """Targets from a list of CUDA architectures, in order, each once: `"8.0 9.0a;sm_100a+PTX"` -> sm80, sm90a, sm100a.

    Separators are blanks, commas and semicolons; an architecture is `9.0a`, `90a`, `sm90a`, `sm_90a`, `compute_90a`, or
    a family name of PyTorch. `+PTX`, `-real` and `-virtual` are accepted and change nothing: an artifact is a cubin.
    """
    targets: list[str] = []
    for word in re.split(r"[\s,;]+", text.strip()):
        if not word:
            continue
        lowered = word.lower()
        family = _FAMILIES.get(lowered.removesuffix("+ptx"))
        if family is not None:
            targets.extend(family)
            continue
        match = _ARCH.fullmatch(lowered)
        if match is None:
            raise _invalid("QUIRE_CUDA_ARCH_LIST", word, 'architectures such as "8.0", "9.0a", "sm_90a" or "Hopper"')
        major, minor, joined, suffix = match.groups()
        targets.append(f"sm{joined or major + minor}{suffix}")
    return tuple(dict.fromkeys(targets))


def arch_list() -> tuple[str, ...] | None:
    """Targets of QUIRE_CUDA_ARCH_LIST, or None if it is unset."""
    value = _read("QUIRE_CUDA_ARCH_LIST")
    return parse_arch_list(value) if value is not None else None


def nvcc() -> str | None:
    """QUIRE_NVCC: a path, or a name looked up on PATH."""
    return _read("QUIRE_NVCC")


def runtime_directory() -> Path:
    """Where files of this user on this machine belong: XDG_RUNTIME_DIR, else the temporary directory."""
    value = _read("XDG_RUNTIME_DIR")
    return Path(value) if value is not None and os.path.isdir(value) else Path(tempfile.gettempdir())  # noqa: PTH112 - a string


def cxx() -> str | None:
    """QUIRE_CXX: a path, or a name looked up on PATH."""
    return _read("QUIRE_CXX")


def cpu_target() -> str | None:
    """QUIRE_CPU_TARGET: the target of host code, or None for the best portable one of this machine."""
    value = _read("QUIRE_CPU_TARGET")
    known = ("x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx", "aarch64", "native")
    if value is not None and value not in known:
        raise _invalid("QUIRE_CPU_TARGET", value, ", ".join(known[:-1]) + " or native")
    return value


def cuda_home() -> Path | None:
    """CUDA_HOME (or CUDA_PATH), without the stray colons that shell start-up files add to it."""
    value = (_read("CUDA_HOME") or _read("CUDA_PATH") or "").strip(": ")
    return Path(value) if value else None


def search_path() -> str:
    """PATH."""
    return os.environ.get("PATH", os.defpath)


def library_path() -> tuple[Path, ...]:
    """The directories of LD_LIBRARY_PATH."""
    return tuple(Path(word) for word in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if word)


def toolchain() -> str | None:
    """QUIRE_TOOLCHAIN: "nvcc" or "nvrtc" for the GPU's code; None to take nvcc where there is one, else NVRTC."""
    value = (_read("QUIRE_TOOLCHAIN") or "auto").lower()
    if value not in ("auto", "nvcc", "nvrtc"):
        raise _invalid("QUIRE_TOOLCHAIN", value, "auto, nvcc or nvrtc")
    return None if value == "auto" else value


def max_jobs() -> int | None:
    """QUIRE_MAX_JOBS: compilers that may run at once on this machine, or None if unset."""
    value = _read("QUIRE_MAX_JOBS")
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise _invalid("QUIRE_MAX_JOBS", value, "a whole number of at least 1")
    return int(value)


def log_level() -> int:
    """QUIRE_LOG as a `logging` level; INFO by default."""
    value = _read("QUIRE_LOG")
    if value is None:
        return logging.INFO
    names = {"debug": 10, "info": 20, "warning": 30, "warn": 30, "error": 40, "critical": 50, "off": 100, "none": 100}
    if value.lower() not in names:
        raise _invalid("QUIRE_LOG", value, "one of " + ", ".join(names))
    return names[value.lower()]


def record_path() -> Path | None:
    """QUIRE_RECORD: the manifest to which used variants are appended, or None."""
    value = _read("QUIRE_RECORD")
    return _path("QUIRE_RECORD", value) if value is not None else None


def flashinfer_overlay() -> str:
    """QUIRE_FLASHINFER: "on" or "off", whether quire.compat.flashinfer replaces names; "auto": where Quire has run."""
    value = (_read("QUIRE_FLASHINFER") or "auto").lower()
    if value not in ("auto", "on", "off"):
        raise _invalid("QUIRE_FLASHINFER", value, "auto, on or off")
    return value


def flash_attn_overlay() -> str:
    """QUIRE_FLASH_ATTN: whether engines' FlashAttention is Quire's: "off", "auto" (where Quire has run) or "on"; "" if
    it is not set.
    """
    value = (_read("QUIRE_FLASH_ATTN") or "").lower()
    if value not in ("", "auto", "on", "off"):
        raise _invalid("QUIRE_FLASH_ATTN", value, "auto, on or off")
    return value


def multiplies_8_bits() -> bool:
    """QUIRE_FP8_PRODUCTS=0: whether FlashAttention-3's functions convert queries of 8 bits, also of long prompts."""
    if (value := _read("QUIRE_FP8_PRODUCTS")) not in (None, "0", "1"):
        raise _invalid("QUIRE_FP8_PRODUCTS", str(value), "0 or 1")
    return value != "0"


def checks_pages() -> bool:
    """QUIRE_CHECK_PAGES=1: whether page numbers and positions that lie on a GPU are checked too, which waits for it."""
    if (value := _read("QUIRE_CHECK_PAGES")) not in (None, "0", "1"):
        raise _invalid("QUIRE_CHECK_PAGES", str(value), "0 or 1")
    return value == "1"


def ask_for_overlays() -> None:
    """Set QUIRE_FLASH_ATTN and QUIRE_FLASHINFER to "on", for this process and for those that it starts."""
    os.environ.update(QUIRE_FLASH_ATTN="on", QUIRE_FLASHINFER="on")


#: What engines set where the bits of a request must not depend on other requests.
_ENGINE_SWITCHES = "VLLM_BATCH_INVARIANT", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE"
#: The names behind os.environ, as bytes: each plan() looks for four, which os.environ takes microseconds to miss.
_names = getattr(os.environ, "_data", os.environb).keys()
#: Whether nothing in the environment may change bits of results. No function, so that the path of a call stays short.
says_nothing_of_results: Callable[[], bool] = partial(
    _names.isdisjoint,
    frozenset(os.fsencode(name) for name in ("QUIRE_DETERMINISTIC", "QUIRE_FP8_PRODUCTS", *_ENGINE_SWITCHES)),
)
says_nothing_of_pages: Callable[[], bool] = partial(_names.isdisjoint, frozenset((b"QUIRE_CHECK_PAGES",)))


def is_deterministic() -> bool:
    """QUIRE_DETERMINISTIC: whether the bits of a request depend on that request alone; unset: as engines' switches say,
    VLLM_BATCH_INVARIANT and SGLang's SGLANG_ENABLE_DETERMINISTIC_INFERENCE.
    """
    if (value := _read("QUIRE_DETERMINISTIC")) is not None:
        if value not in ("0", "1"):
            raise _invalid("QUIRE_DETERMINISTIC", value, "0 or 1")
        return value == "1"
    return any(os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in _ENGINE_SWITCHES)


def reports_progress() -> bool:
    """Whether this process is the one of its node that prints progress (LOCAL_RANK unset or 0)."""
    return (_read("LOCAL_RANK") or "0") == "0"


def environment_with(**overrides: str) -> dict[str, str]:
    """Our environment with `overrides`."""
    return {**os.environ, **overrides}


def child_environment(**overrides: str) -> dict[str, str]:
    """A compiler's environment: ours without variables that change its output, messages in English, and `overrides`."""
    environment = {name: value for name, value in os.environ.items() if name not in _SCRUBBED}
    environment.update(LC_ALL="C", LANG="C", **overrides)
    return environment
