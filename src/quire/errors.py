"""What Quire raises.

QuireError
├── ValidationError (also ValueError)        an argument has a wrong type, shape, dtype, device or value
├── UnsupportedError (also NotImplementedError)  no kernel takes this problem; carries each kernel's reason
│   └── UnsupportedArgumentError (also ValidationError)  an argument of another library that Quire has no use for
├── PlanError (also RuntimeError)            run() before plan(), or a plan used where it cannot be
├── CompileError (also RuntimeError)         a compiler was missing or failed; carries its log
├── CacheMissError (also RuntimeError)       compiling is denied and the variant is not in any store
├── CacheError (also RuntimeError)           a store could not be read or written, or must not be trusted
├── RankError (also RuntimeError)            another rank of a process group failed, or did not answer in time
└── DriverError (also RuntimeError)          the CUDA driver refused a call
"""

from __future__ import annotations

__all__ = [
    "CacheError", "CacheMissError", "CompileError", "DriverError", "PlanError", "QuireError", "RankError",
    "UnsupportedArgumentError", "UnsupportedError", "ValidationError",
]  # fmt: skip


class QuireError(Exception):
    """Base of everything that Quire raises on purpose."""


class ValidationError(QuireError, ValueError):
    """An argument is wrong: says which, what was expected and what was passed."""


class UnsupportedError(QuireError, NotImplementedError):
    """No kernel accepts the problem: lists each kernel's reason."""


class UnsupportedArgumentError(ValidationError, UnsupportedError):
    """An argument that another library uses and Quire does not: says which and why. Where FlashInfer is installed,
    quire.compat.flashinfer hands such a call to it.
    """


class PlanError(QuireError, RuntimeError):
    """A wrapper was used out of order."""


class CompileError(QuireError, RuntimeError):
    """A compiler is missing or failed: the first error line, then the path of the whole log."""


class CacheMissError(QuireError, RuntimeError):
    """Compiling is denied (QUIRE_JIT=deny) and no store holds the variant: names the command that builds it."""


class CacheError(QuireError, RuntimeError):
    """A store is unusable or holds something that must not be loaded."""


class RankError(QuireError, RuntimeError):
    """A rank of a process group failed or did not answer in time: names it, and carries torch.distributed's error."""


class DriverError(QuireError, RuntimeError):
    """The CUDA driver returned an error: names the call and the error."""
