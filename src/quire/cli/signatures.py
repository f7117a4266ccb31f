"""`quire cache verify`, `sign` and `keygen`: what is in the cache, an archive or the shared tier, and who made it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli import parser
from quire.cli.parser import add_command, tell
from quire.errors import CacheError, ValidationError
from quire.jit import Manifest, Store
from quire.jit.archive import verify_archive
from quire.jit.signing import PrivateKey, TrustedKeys, parse_date, signing_key, trusted_keys
from quire.jit.stores import prebuilt_stores, user_store

if TYPE_CHECKING:
    from quire.jit.tier import Tier


def add_actions(actions: Any) -> None:
    """Add `verify`, `sign` and `keygen` to the parser of `cache`."""
    verify = add_command(actions, "verify", _verify, "check each entry's owner, mode, size, digest and signature")
    verify.add_argument("file", nargs="?", type=Path, metavar="FILE", help="entries of an archive, not of the cache")
    verify.add_argument("--keys", type=Path, metavar="FILE", help="public keys (default: QUIRE_TRUSTED_KEYS)")
    verify.add_argument("--signed", action="store_true", help="entries of the cache must be signed, too")
    sign = add_command(actions, "sign", _sign, "sign entries with the private key of QUIRE_SIGNING_KEY")
    sign.add_argument("words", nargs="*", metavar="WORD", help="only variants whose name has each of these words")
    sign.add_argument("--key", type=Path, metavar="FILE", help="the private key (default: QUIRE_SIGNING_KEY)")
    for action in (verify, sign):
        action.add_argument("--store", type=Path, metavar="DIR", help="entries of this directory, not the user's cache")
        action.add_argument("--tier", action="store_true", help="objects of QUIRE_SHARED_CACHE")
    keygen = add_command(actions, "keygen", _keygen, "make a pair of keys: FILE signs, FILE.pub is for readers")
    keygen.add_argument("file", type=Path, metavar="FILE", help="the new file of the private key")
    keygen.add_argument("--id", metavar="KEY", help="the key's name in signatures and messages (default: FILE's)")
    expires = "last day on which the key is good, YYYY-MM-DD (default: none)"
    keygen.add_argument("--expires", type=parser.checked(parse_date), metavar="DATE", help=expires)


def store_of(options: argparse.Namespace) -> Store:
    """The store of --store, else the user's."""
    return user_store() if options.store is None else Store(options.store.expanduser().absolute())


def keys_of(options: argparse.Namespace) -> TrustedKeys | None:
    """The keys of --keys, else of QUIRE_TRUSTED_KEYS, if any."""
    return trusted_keys() if options.keys is None else TrustedKeys.read(options.keys.expanduser(), "--keys")


def _verify(options: argparse.Namespace) -> int:
    if sum((options.file is not None, options.store is not None, options.tier)) > 1:
        raise ValidationError("cache verify: expected one of FILE, --store and --tier.")
    if options.tier:
        found = [(slug or name, reason) for name, slug, reason in _tier("verify").verify(_local_manifests())]
        return _tell_verified(options, found, "objects")
    keys = keys_of(options)
    if options.signed and keys is None:
        raise ValidationError("cache verify --signed: expected --keys or QUIRE_TRUSTED_KEYS.")
    if options.file is not None:
        return _tell_verified(options, verify_archive(options.file.expanduser().absolute(), keys), "entries")
    return _tell_verified(options, _verify_store(store_of(options), keys, options.signed), "entries")


def _verify_store(store: Store, keys: TrustedKeys | None, signed: bool) -> list[tuple[str, str]]:
    """(path, what is wrong, or "") of each entry. A signature must be right; with `signed` there must be one."""
    times = [
        (path, path.stat()) for kept in store.paths() if kept.is_dir() for path in kept.iterdir() if path.is_file()
    ]
    bad = dict(store.problems())
    for path in store.paths():
        try:
            if path not in bad and keys is not None and store.signer(path, keys) is None and signed:
                bad[path] = "it is not signed"
        except (CacheError, OSError) as error:
            bad[path] = str(error)
    for path, status in times:  # verifying is not using: `gc --unused-for` must not count it
        if path.is_file() and os.access(path, os.W_OK):
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return [(str(path), bad.get(path, "")) for path in store.paths()]


def _tell_verified(options: argparse.Namespace, found: list[tuple[str, str]], what: str) -> int:
    bad = [{"path": path, "error": error} for path, error in found if error]
    text = "\n".join([*(f"{entry['path']}: {entry['error']}" for entry in bad), f"{len(found)} {what}, {len(bad)} bad"])
    tell(options, text, ok=not bad, entries=len(found), bad=bad)
    return int(bool(bad))


# --- sign ------------------------------------------------------------------------------------------------------------


def _tier(action: str) -> Tier:
    from quire.jit.tier import shared_tier  # with a client of HTTP

    if (tier := shared_tier()) is None:
        raise ValidationError(f"cache {action} --tier: expected QUIRE_SHARED_CACHE to name the shared tier, got none.")
    return tier


def _local_manifests() -> list[Manifest]:
    """Manifests of this machine, for storage that does not list its objects."""
    return [manifest for store in (*prebuilt_stores(), user_store()) for _, manifest in store.manifests()]


def _sign(options: argparse.Namespace) -> int:
    if options.tier:
        if options.words or options.key or options.store:
            raise ValidationError("cache sign --tier: expected no WORD, --key or --store; QUIRE_SIGNING_KEY signs.")
        return _tell_verified(options, list(_tier("sign").sign(_local_manifests())), "objects")
    key = signing_key() if options.key is None else PrivateKey.read(options.key.expanduser(), "--key")
    if key is None:
        raise ValidationError("cache sign: expected --key or QUIRE_SIGNING_KEY; `quire cache keygen FILE` makes a key.")
    store = store_of(options)
    paths = [path for path in store.paths() if all(word in path.parent.name for word in options.words)]
    if not paths:
        raise CacheError(f"{store.root} has no entry of {' '.join(options.words) or 'any variant'}")
    for path in paths:
        try:
            store.sign(path, key)
        except (CacheError, OSError) as error:
            raise CacheError(f"{path} is not signed: {error}") from error
    return tell(options, f"{len(paths)} entries signed by {key.name}", entries=len(paths), key=key.name)


def _keygen(options: argparse.Namespace) -> int:
    file = options.file.expanduser().absolute()
    key = PrivateKey.generate(file.stem if options.id is None else options.id)
    public = key.write(file, options.expires)
    text = (
        f"{file} signs: keep it where entries are made (QUIRE_SIGNING_KEY)\n"
        f"{public} checks: add its line to the file of QUIRE_TRUSTED_KEYS of each reader"
    )
    return tell(options, text, key=key.name, private=str(file), public=str(public))
