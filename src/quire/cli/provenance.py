"""Who made what, and whether it is as it was made: signatures of entries, and wheels of releases.

`quire cache verify`, `sign` and `keygen` look at the cache, an archive or the shared tier. `quire verify-release` looks
at wheels. Beside those lie SHA256SUMS (as sha256sum writes it), for each a bill of materials (CycloneDX,
WHEEL.cdx.json), and, if the release is signed, SHA256SUMS.signature (jit/trust.py). All but the signature follow from
the wheels, so that anybody can make them again and compare.
"""

from __future__ import annotations

import argparse
import base64
import calendar
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import cli
from quire.cli import add_command, count, tell
from quire.cli.aot import spec_of
from quire.errors import CacheError, QuireError, ValidationError
from quire.jit import Manifest, Store, build, config
from quire.jit.archive import verify_archive
from quire.jit.store import MANIFEST
from quire.jit.stores import prebuilt_stores, user_store
from quire.jit.trust import PrivateKey, TrustedKeys, parse_date, signing_key, subject_of_file, trusted_keys

if TYPE_CHECKING:
    from quire.jit.tier import Tier

SUMS, SIGNED = "SHA256SUMS", "SHA256SUMS.signature"
_ENTRIES = "quire_jit_cache/store/"
#: What the two wheels are built from, by the folder of the project in a checkout.
_SOURCES = {
    "quire-attention": ("", ("src", "templates", "pyproject.toml", "README.md", "LICENSE")),
    "quire-attention-jit-cache": ("jit_cache", ("src", "pyproject.toml", "README.md", "LICENSE", "hatch_build.py")),
}


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
    keygen.add_argument("--expires", type=cli.checked(parse_date), metavar="DATE", help=expires)


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


# --- releases -------------------------------------------------------------------------------------------------------


def add_commands(commands: Any) -> None:
    """Add `verify-release` to the parser."""
    verify = add_command(
        commands, "verify-release", _verify_release, "check wheels of a release",
        f"Check wheels: {SUMS}, its signature, the bill of materials, every file, and with --source a rebuild.",
    )  # fmt: skip
    verify.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL", help=f"beside it: {SUMS}, WHEEL.cdx.json")
    verify.add_argument("--keys", type=Path, metavar="FILE", help="public keys (default: QUIRE_TRUSTED_KEYS)")
    verify.add_argument("--source", type=Path, metavar="DIR", help="build the wheels again from this checkout")
    text = "compile N of the prebuilt variants again, and compare"
    verify.add_argument("--recompile", type=count, metavar="N", help=text)


def _verify_release(options: argparse.Namespace) -> int:
    keys = trusted_keys() if options.keys is None else TrustedKeys.read(options.keys, "--keys")
    results = []
    for wheel in options.wheels:
        faults = list(_faults(wheel.expanduser().absolute(), keys, options.source, options.recompile or 0))
        results.append({"wheel": wheel.name, "ok": not faults, "faults": faults})
    lines = [f"{r['wheel']}: {fault}" for r in results for fault in r["faults"]]
    lines += [f"{r['wheel']}: ok" for r in results if r["ok"]]
    ok = all(result["ok"] for result in results)
    tell(options, "\n".join(lines), ok=ok, wheels=results, signed=keys is not None, rebuilt=options.source is not None)
    return int(not ok)


def _faults(wheel: Path, keys: TrustedKeys | None, source: Path | None, recompile: int) -> Iterator[str]:
    """What is wrong with a wheel."""
    if not zipfile.is_zipfile(wheel):
        yield f"expected a wheel, got {'something else' if wheel.is_file() else 'no file'} at {wheel}"
        return
    yield from _fault_of_sums(wheel, keys)
    found = Wheel(wheel)
    yield from found.wrong_files()
    bill = wheel.with_name(f"{wheel.name}.cdx.json")
    if not bill.is_file() or bill.read_text(encoding="utf-8") != found.bill_of_materials():
        yield f"{bill.name} is {'another than that of this wheel' if bill.is_file() else 'missing'}"
    with tempfile.TemporaryDirectory(prefix="quire-") as directory:
        store = Store(Path(directory, "store"), keys=lambda: keys)
        if found.entries:
            found.unpack_entries(store.root)
            yield from (f"{path.parent.name}/{path.name}: {reason}" for path, reason in store.problems())
            yield from _wrong_compiles(store, recompile, Path(directory))
        if source is not None:
            yield from found.differences(source.expanduser().absolute(), Path(directory))


def _fault_of_sums(wheel: Path, keys: TrustedKeys | None) -> Iterator[str]:
    sums = wheel.with_name(SUMS)
    if not sums.is_file():
        yield f"there is no {SUMS} beside it"
        return
    data = sums.read_bytes()
    rows = [line.partition("  ") for line in data.decode("utf-8", "replace").splitlines()]
    listed = {name: digest for digest, _, name in rows}
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if listed.get(wheel.name) != digest:
        yield f"its sha256 is {digest}, {SUMS} says {listed.get(wheel.name, 'nothing of it')}"
    if keys is not None:
        signature = wheel.with_name(SIGNED)
        try:
            line = signature.read_bytes().removesuffix(b"\n") if signature.is_file() else b""
            keys.check(line, subject_of_file(SUMS, data))
        except CacheError as error:
            yield f"{SUMS}: {error}"


def _wrong_compiles(store: Store, most: int, scratch: Path) -> Iterator[str]:
    """Compile at most `most` entries, spread over all, and compare what this machine's compiler makes."""
    manifests = [manifest for _, manifest in store.manifests()]
    for manifest in manifests[:: max(1, len(manifests) // most)][:most] if most else ():
        own = Store(scratch / "compiled")
        try:
            _, entry = build(spec_of(manifest.slug), store=own)
        except QuireError as error:
            yield f"{manifest.slug} cannot be compiled here: {error}"
            continue
        made = entry.manifest
        if made.request != manifest.request:
            yield f"{manifest.slug} is not of the sources of this Quire"
        elif made.toolchain != manifest.toolchain:
            theirs, ours = (m.toolchain.get("version", "?").splitlines()[-1] for m in (manifest, made))
            yield f"{manifest.slug} cannot be compared: it was compiled by {theirs!r}, here is {ours!r}"
        elif made.sha256 != manifest.sha256:
            yield f"{manifest.slug}: the same compiler makes {made.sha256} of it here, the wheel has {manifest.sha256}"


class Wheel:
    """A built wheel, its metadata and members."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive = zipfile.ZipFile(path)
        (self._info,) = {n.split("/")[0] for n in self._archive.namelist() if n.split("/")[0].endswith(".dist-info")}
        self.metadata = HeaderParser().parsestr(self._text("METADATA"))
        self.name, self.version = str(self.metadata["Name"]), str(self.metadata["Version"])

    def _text(self, name: str) -> str:
        return self._archive.read(f"{self._info}/{name}").decode()

    @property
    def members(self) -> list[str]:
        """The names of all files, sorted."""
        return sorted(name for name in self._archive.namelist() if not name.endswith("/"))

    @property
    def entries(self) -> list[str]:
        """The files of prebuilt entries."""
        return [name for name in self.members if name.startswith(f"{_ENTRIES}entries/")]

    @property
    def epoch(self) -> int:
        """SOURCE_DATE_EPOCH of the build: the time of the files."""
        return calendar.timegm(min(info.date_time for info in self._archive.infolist()))

    @property
    def generator(self) -> str:
        """The program that built it, such as "hatchling 1.33.0"."""
        return str(HeaderParser().parsestr(self._text("WHEEL"))["Generator"])

    def wrong_files(self) -> Iterator[str]:
        """Files that RECORD does not list, or lists with another digest, and listed ones that are missing."""
        rows = [line.rsplit(",", 2) for line in self._text("RECORD").splitlines()]
        listed = {row[0].strip('"'): row[1] for row in rows if len(row) == 3}
        for name in self.members:
            digest = base64.urlsafe_b64encode(hashlib.sha256(self._archive.read(name)).digest()).decode().rstrip("=")
            if name != f"{self._info}/RECORD" and listed.get(name) != f"sha256={digest}":
                yield f"{name} is not the file that RECORD lists"
        yield from (f"{name} is listed in RECORD and missing" for name in sorted(set(listed) - set(self.members)))

    def unpack_entries(self, root: Path) -> None:
        """Write the prebuilt entries below `root`, as a store has them."""
        for name in self.entries:
            place = root.joinpath(*name.removeprefix(_ENTRIES).split("/"))
            if ".." in place.parts:
                raise CacheError(f"{self.path.name} has a file outside of its store: {name!r}")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(self._archive.read(name))

    def bill_of_materials(self) -> str:
        """CycloneDX 1.6, in JSON: the package, its requirements, its files with their digests, and their compilers."""
        digest = hashlib.sha256(self.path.read_bytes()).hexdigest()
        own = f"pkg:pypi/{self.name}@{self.version}"
        needed = [_requirement(str(text)) for text in self.metadata.get_all("Requires-Dist", [])]
        compiled = self._compilers()
        bill = {
            "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
            "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'sha256:{digest}')}",
            "metadata": {
                "timestamp": _iso(self.epoch),
                "component": {
                    "type": "library", "bom-ref": own, "name": self.name, "version": self.version, "purl": own,
                    "licenses": [{"license": {"id": str(self.metadata["License-Expression"])}}],
                    "hashes": [{"alg": "SHA-256", "content": digest}],
                },
                "tools": {"components": [{"type": "application", "name": self.generator}]},
            },
            "components": needed + [_file(name, self._archive.read(name), compiled.get(name)) for name in self.members],
            "dependencies": [{"ref": own, "dependsOn": sorted({one["bom-ref"] for one in needed})}],
        }  # fmt: skip
        return json.dumps(bill, indent=1, sort_keys=True) + "\n"

    def _compilers(self) -> dict[str, dict[str, str]]:
        """For each prebuilt artifact its variant, target and compiler."""
        found = {}
        for name in self.entries:
            if name.endswith(f"/{MANIFEST}"):
                m = Manifest.read(self._archive.read(name))
                compiler = f"{m.toolchain.get('toolchain', '?')} {m.toolchain.get('version', '?').splitlines()[-1]}"
                values = {"variant": m.slug, "target": m.target, "compiler": compiler}
                found[name.removesuffix(MANIFEST) + m.artifact] = values
        return found

    def differences(self, checkout: Path, scratch: Path) -> Iterator[str]:
        """Build the wheel again, of the sources in `checkout` and its own prebuilt entries, and compare the bytes."""
        folder, parts = _SOURCES.get(self.name, ("", ()))
        if not parts or not (checkout / folder / "pyproject.toml").is_file():
            raise ValidationError(
                f"--source: expected a checkout of Quire, from which {self.name} is built, got {checkout}"
            )
        copy = scratch / "source"
        copy.mkdir()
        for part in parts:
            source = checkout / folder / part
            if source.is_dir():
                shutil.copytree(
                    source, copy / part, ignore=shutil.ignore_patterns("__pycache__", "store", "*.egg-info")
                )
            else:
                shutil.copy(source, copy / part)
        self.unpack_entries(copy / "src/quire_jit_cache/store")
        command = [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--wheel",
            "--outdir",
            str(scratch / "built"),
            str(copy),
        ]
        environment = config.environment_with(SOURCE_DATE_EPOCH=str(self.epoch))
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            yield f"it cannot be built again ({''.join(last)}); `pip install build hatchling` in this environment"
            return
        (built,) = (scratch / "built").glob("*.whl")
        if built.read_bytes() != self.path.read_bytes():
            yield from _explain(self, Wheel(built))


def _explain(wheel: Wheel, rebuilt: Wheel) -> Iterator[str]:
    """How two wheels differ."""
    if wheel.generator != rebuilt.generator:
        version = wheel.generator.rpartition(" ")[2]
        yield f"it was built by {wheel.generator}, again by {rebuilt.generator}: `pip install hatchling=={version}`"
        return
    mine, other = ({n: w._archive.read(n) for n in w.members} for w in (wheel, rebuilt))
    names = sorted(n for n in {*mine, *other} if mine.get(n) != other.get(n) and not n.endswith("/RECORD"))
    yield from (
        f"rebuilt from the sources, {name} is {'different' if name in mine and name in other else 'missing in one'}"
        for name in names
    )
    if not names:
        yield "rebuilt from the sources, it has equal files in another archive (order, times or modes)"


def _requirement(text: str) -> dict[str, Any]:
    """A component of one line Requires-Dist; requirements of extras are optional."""
    name = re.match(r"[A-Za-z0-9._-]+", text)
    assert name is not None  # METADATA has no other
    return {
        "type": "library", "name": name.group(), "bom-ref": f"requirement:{text}",
        "purl": f"pkg:pypi/{re.sub(r'[-_.]+', '-', name.group()).lower()}",
        "scope": "optional" if "extra ==" in text else "required",
        "properties": [{"name": "quire:requirement", "value": text}],
    }  # fmt: skip


def _file(name: str, data: bytes, compiled: Mapping[str, str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "file", "name": name, "bom-ref": f"file:{name}",
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}],
    }  # fmt: skip
    if compiled:
        found["properties"] = [{"name": f"quire:{label}", "value": value} for label, value in compiled.items()]
    return found


def _iso(epoch: int) -> str:
    from datetime import datetime, timezone

    return datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def describe(directory: Path, key: PrivateKey | None) -> list[Path]:
    """Write what lies beside the wheels of a directory: SHA256SUMS, its signature, WHEEL.cdx.json."""
    wheels = sorted(directory.glob("*.whl"))
    if not wheels:
        raise ValidationError(f"release: expected wheels in {directory}, got none")
    written = []
    for wheel in wheels:
        written.append(wheel.with_name(f"{wheel.name}.cdx.json"))
        written[-1].write_text(Wheel(wheel).bill_of_materials(), encoding="utf-8")
    files = sorted([*wheels, *written])
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    written.append(directory / SUMS)
    written[-1].write_text(sums, encoding="utf-8")
    (directory / SIGNED).unlink(missing_ok=True)
    if key is not None:
        written.append(directory / SIGNED)
        written[-1].write_bytes(key.sign(subject_of_file(SUMS, sums.encode())) + b"\n")
    return written
