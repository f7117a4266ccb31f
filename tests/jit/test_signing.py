"""Ed25519 signatures: hostile entries in the tier, in archives and in packages; keys that change; the commands."""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json
import re
import shutil
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from object_server import Server
from scale import HOST, Collect, FakeCompiler

from quire import cli, jit
from quire.errors import CacheError, ValidationError
from quire.jit import archive, doctor, tier, trust
from quire.jit.store import MANIFEST, Manifest, Store
from quire.jit.trust import SIGNATURE, PrivateKey, TrustedKeys, subject_of_entry, subject_of_object

OTHER = replace(HOST, slug="scale.other")
Files = dict[str, bytes]
Make = Callable[[jit.Spec], jit.Entry]
Sign = Callable[[PrivateKey, Files], bytes]  #: the line of a signature of these files, as this channel has it


class Keys(NamedTuple):
    """The keys of one test: two that readers trust, one of which has expired, and an attacker's two."""

    good: PrivateKey
    expired: PrivateKey
    unknown: PrivateKey
    false: PrivateKey  #: with the good one's name
    file: Path  #: of the public keys


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Public keys in QUIRE_TRUSTED_KEYS."""
    made = {name: PrivateKey.generate(name) for name in ("ci", "ci-2019", "mallory")}
    yesterday = date.today() - timedelta(days=2)
    lines = [replace(made["ci"].public, expires=date.today() + timedelta(days=400)).line() + "  # the build machine"]
    lines += ["# before", replace(made["ci-2019"].public, expires=yesterday).line()]
    file = tmp_path / "trusted.keys"
    file.write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("QUIRE_TRUSTED_KEYS", str(file))
    return Keys(made["ci"], made["ci-2019"], made["mallory"], PrivateKey.generate("ci"), file)


@pytest.fixture(autouse=True)
def tiers() -> Iterator[None]:
    tier._open_tier.cache_clear()
    yield
    tier._open_tier.cache_clear()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
        server.shutdown()


@pytest.fixture
def made(
    fake: FakeCompiler, templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: Callable[[], None]
) -> Make:
    """An entry of a spec, from a maker's cache."""

    def make(spec: jit.Spec) -> jit.Entry:
        with monkeypatch.context() as patch:
            patch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "maker"))
            patch.delenv("QUIRE_TRUSTED_KEYS", raising=False)
            patch.delenv("QUIRE_SHARED_CACHE", raising=False)
            entry = jit.build(spec, templates=templates)[1]
        restart()
        return entry

    return make


def files_of(entry: jit.Entry) -> Files:
    return {file.name: file.read_bytes() for file in sorted(entry.path.iterdir())}


def pack(entry: jit.Entry, files: Files) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as written:
        for name, data in files.items():
            member = tarfile.TarInfo(f"entries/{entry.slug}/{entry.path.name}/{name}")
            member.size = len(data)
            written.addfile(member, io.BytesIO(data))
    return packed.getvalue()


# --- hostile entries -------------------------------------------------------------------------------------------------


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def with_artifact(files: Files, artifact: bytes, **changes: object) -> Files:
    """An entry whose manifest agrees with another artifact."""
    manifest = Manifest.read(files[MANIFEST])
    digest = hashlib.sha256(artifact).hexdigest()
    changed = replace(manifest, size=len(artifact), sha256=digest, **changes)
    return {**files, MANIFEST: changed.write().encode(), manifest.artifact: artifact}


def artifact_of(files: Files) -> str:
    return Manifest.read(files[MANIFEST]).artifact


def source_of(files: Files) -> str:
    return next(name for name in files if name not in (MANIFEST, artifact_of(files)))


def in_base64(line: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The line with its 64 bytes changed."""
    head, _, text = line.rpartition(b" ")
    return head + b" " + base64.b64encode(change(base64.b64decode(text)))


DOES_NOT_FIT = "signature by 'ci' does not fit"
Forgery = Callable[[Keys, Files, Files, Sign], "tuple[Files, bytes | None]"]
#: What somebody does who can write there, has the public keys and all that was ever signed, and no private key of ours:
#: (files, line of the signature), and what the refusal says.
HOSTILE: dict[str, tuple[Forgery, str]] = {
    "forged, unknown key": (
        lambda k, f, o, sign: (g := with_artifact(f, o[artifact_of(o)] + b"evil"), sign(k.unknown, g)),
        "unknown key 'mallory'",
    ),
    "forged, a trusted key's name": (
        lambda k, f, o, sign: (g := with_artifact(f, o[artifact_of(o)] + b"evil"), sign(k.false, g)),
        DOES_NOT_FIT,
    ),
    "forged, expired key": (
        lambda k, f, o, sign: (g := with_artifact(f, b"evil" + f[artifact_of(f)]), sign(k.expired, g)),
        "expired on",
    ),
    "genuine, expired key": (lambda k, f, o, sign: (f, sign(k.expired, f)), "expired on .*`quire cache sign`"),
    "genuine, unknown key": (lambda k, f, o, sign: (f, sign(k.unknown, f)), "add its line to"),
    "signature of another entry": (lambda k, f, o, sign: (f, sign(k.good, o)), DOES_NOT_FIT),
    "bit of the manifest": (
        lambda k, f, o, sign: ({**f, MANIFEST: flipped(f[MANIFEST], len(f[MANIFEST]) // 2)}, sign(k.good, f)),
        f"manifest|{DOES_NOT_FIT}",
    ),
    "bit of the artifact": (
        lambda k, f, o, sign: ({**f, artifact_of(f): flipped(f[artifact_of(f)], 100)}, sign(k.good, f)),
        f"sha256|{DOES_NOT_FIT}",
    ),
    "bit of the source": (
        lambda k, f, o, sign: ({**f, source_of(f): flipped(f[source_of(f)] or b"x", 0)}, sign(k.good, f)),
        DOES_NOT_FIT,
    ),
    "bit of the signature": (
        lambda k, f, o, sign: (f, in_base64(sign(k.good, f), lambda raw: flipped(raw, 40))),
        DOES_NOT_FIT,
    ),
    "bit of the key's name": (lambda k, f, o, sign: (f, flipped(sign(k.good, f), 18)), "unknown key"),
    "truncated artifact": (
        lambda k, f, o, sign: ({**f, artifact_of(f): f[artifact_of(f)][:-1]}, sign(k.good, f)),
        f"bytes, expected|{DOES_NOT_FIT}",
    ),
    "truncated signature": (lambda k, f, o, sign: (f, in_base64(sign(k.good, f), lambda raw: raw[:32])), DOES_NOT_FIT),
    "swapped artifacts": (
        lambda k, f, o, sign: (with_artifact(f, o[artifact_of(o)] + b"!"), sign(k.good, f)),
        DOES_NOT_FIT,
    ),
    "another entry in its place": (
        lambda k, f, o, sign: (o, sign(k.good, o)),
        f"does not belong to its name|expected one entry|{DOES_NOT_FIT}",
    ),
    "HMAC with the public key as its secret": (
        lambda k, f, o, sign: (f, in_base64(sign(k.good, f), lambda it: hmac.digest(k.good.public.raw, it, "sha512"))),
        DOES_NOT_FIT,
    ),
    "empty signature": (lambda k, f, o, sign: (f, b""), "it is not signed"),
    "no signature": (lambda k, f, o, sign: (f, None), "it is not signed|HMAC or no signature"),
    "unknown version": (
        lambda k, f, o, sign: (f, sign(k.good, f).replace(b"quire-signature-1", b"quire-signature-9")),
        "format 'quire-signature-9'",
    ),
    "another target": (
        lambda k, f, o, sign: (with_artifact(f, f[artifact_of(f)], target="sm90a"), sign(k.good, f)),
        DOES_NOT_FIT,
    ),
}  # fmt: skip


def test_there_are_sixty_of_them() -> None:
    assert len(HOSTILE) * 3 == 60


def signs_entries(entry: jit.Entry, other: jit.Entry) -> Sign:
    """Signs files as those of the entry that their manifest is of, or of `entry`."""
    of_other = (other.path / MANIFEST).read_bytes()

    def sign(key: PrivateKey, files: Files) -> bytes:
        named = other if files[MANIFEST] == of_other else entry
        return key.sign(subject_of_entry(named.slug, named.path.name, files))

    return sign


def hostile(name: str, keys: Keys, entry: jit.Entry, other: jit.Entry) -> tuple[Files, str]:
    """The files of a hostile entry in the place of `entry`, and the reason of its refusal."""
    forge, reason = HOSTILE[name]
    files, line = forge(keys, files_of(entry), files_of(other), signs_entries(entry, other))
    return (files if line is None else {**files, SIGNATURE: line + b"\n"}), reason


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_entries_of_an_archive(name: str, keys: Keys, made: Make, tmp_path: Path) -> None:
    entry = made(HOST)
    files, reason = hostile(name, keys, entry, made(OTHER))
    bundle = tmp_path / "bundle.tar"
    bundle.write_bytes(pack(entry, files))
    store = Store(tmp_path / "reader")
    with pytest.raises(CacheError, match=reason):
        archive.import_entries(bundle, store, keys=trust.trusted_keys())
    assert list(store.paths()) == []
    ((place, told),) = archive.verify_archive(bundle, trust.trusted_keys())
    assert place == f"{entry.slug}/{entry.path.name}" and re.search(reason, told)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_entries_of_a_package(
    name: str, keys: Keys, made: Make, fake: FakeCompiler, templates: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    entry = made(HOST)
    files, reason = hostile(name, keys, entry, made(OTHER))
    place = install(tmp_path, monkeypatch, entry, files)
    compiles = fake.compiles
    with Collect() as lines:
        status, built = jit.build(HOST, templates=templates)
    assert (status, fake.compiles) == ("built", compiles + 1)
    assert built.path != place
    (told,) = [line for line in lines if "ignored the cache entry" in line]
    assert re.search(reason, told), told


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: jit.Entry, files: Files) -> Path:
    """Install a package with one entry; returns the entry's place."""
    package = tmp_path / "site/quire_jit_cache"
    place = package / "store/entries" / entry.slug / entry.path.name
    place.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for name, data in files.items():
        (place / name).write_bytes(data)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return place


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_objects_of_the_tier(
    name: str, keys: Keys, made: Make, fake: FakeCompiler, templates: Path, server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    entry, other = made(HOST), made(OTHER)
    forge, reason = HOSTILE[name]
    of_other = files_of(other)
    for at, elsewhere in zip(tier._names_of(entry.manifest), tier._names_of(other.manifest), strict=True):

        def sign(key: PrivateKey, files: Files, at: str = at, elsewhere: str = elsewhere) -> bytes:
            is_other = files[MANIFEST] == of_other[MANIFEST]
            body = pack(other if is_other else entry, files)
            return key.sign(subject_of_object(elsewhere if is_other else at, body))

        files, line = forge(keys, files_of(entry), of_other, sign)
        body = pack(entry, files)
        head = b"quire-object-1 unsigned" if line is None else b"quire-object-2 " + line
        if "HMAC" in name:  # which has a format of its own here
            head, _, _ = archive.sealed(keys.good.public.raw, at, body).partition(b"\n")
            reason = "HMAC or no signature"
        server.objects[f"/ac/{at}"] = head + b"\n" + body
    monkeypatch.setenv("QUIRE_SHARED_CACHE", server.url)
    compiles = fake.compiles
    with Collect() as lines:
        status, _ = jit.build(HOST, templates=templates)
    assert (status, fake.compiles) == ("built", compiles + 1)
    told = [line for line in lines if "ignored the object" in line]
    assert told and all(re.search(reason, line) for line in told), told


# --- genuine entries -------------------------------------------------------------------------------------------------


def signed(entry: jit.Entry, key: PrivateKey) -> Files:
    files = files_of(entry)
    return {**files, SIGNATURE: key.sign(subject_of_entry(entry.slug, entry.path.name, files)) + b"\n"}


def test_genuine_entries_of_an_archive_and_a_package_load(
    keys: Keys, made: Make, fake: FakeCompiler, templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = made(HOST)
    bundle = tmp_path / "bundle.tar"
    bundle.write_bytes(pack(entry, signed(entry, keys.good)))
    (imported,) = archive.import_entries(bundle, Store(tmp_path / "reader"), keys=trust.trusted_keys())
    assert (imported.path / SIGNATURE).is_file(), "the signature stays with the entry"
    assert Store(tmp_path / "reader").signer(imported.path, trust.trusted_keys()) == "ci"
    place = install(tmp_path, monkeypatch, entry, signed(entry, keys.good))
    assert jit.build(HOST, templates=templates)[1].path == place
    assert fake.compiles == 1


def test_without_public_keys_nothing_need_be_signed(
    made: Make, fake: FakeCompiler, templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = made(HOST)
    place = install(tmp_path, monkeypatch, entry, files_of(entry))
    assert jit.build(HOST, templates=templates)[1].path == place


@pytest.fixture
def maker(keys: Keys, tmp_path: Path) -> dict[str, str]:
    """The settings of a host that makes entries."""
    keys.good.write(tmp_path / "ci.key", None)
    return {"QUIRE_SIGNING_KEY": str(tmp_path / "ci.key")}


def host(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, templates: Path, restart: Callable[[], None],
    settings: dict[str, str],
) -> str:  # fmt: skip
    """What a build on a host of this name does."""
    restart()
    tier._open_tier.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("QUIRE_CACHE_DIR", str(tmp_path / name))
        for variable, value in settings.items():
            patch.setenv(variable, value)
        return jit.build(HOST, templates=templates)[0]


def test_a_maker_signs_and_readers_read_and_write_nothing(
    fake: FakeCompiler, keys: Keys, maker: dict[str, str], server: Server, templates: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, restart: Callable[[], None],
) -> None:  # fmt: skip
    monkeypatch.setenv("QUIRE_SHARED_CACHE", server.url)
    at = (monkeypatch, tmp_path, templates, restart)
    assert host("reader", *at, {}) == "built"
    assert server.objects == {}, "a host without the private key cannot add anything"
    assert host("maker", *at, maker) == "built"
    assert sum(data.startswith(b"quire-object-2 quire-signature-1 ci ") for data in server.objects.values()) == 3
    assert host("another reader", *at, {}) == "hit"
    path = next((tmp_path / "another reader").glob("entries/*/*"))
    assert Store(tmp_path / "another reader").signer(path, trust.trusted_keys()) == "ci"


def test_an_object_of_ed25519_means_nothing_to_an_hmac(server: Server, keys: Keys) -> None:
    signatures = archive.Signatures(TrustedKeys.read(keys.file), keys.good)
    data = archive.sealed(signatures, "name", b"body")
    assert archive.opened(signatures, "name", data) == b"body"
    with pytest.raises(CacheError, match="set QUIRE_TRUSTED_KEYS"):
        archive.opened(b"0123456789abcdef", "name", data)
    with pytest.raises(CacheError, match="set QUIRE_TRUSTED_KEYS"):
        archive.opened(None, "name", data)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_is_good_until_the_end_of_its_day(keys: Keys) -> None:
    for days, good in ((0, True), (-1, False)):
        day = trust._today() + timedelta(days=days)
        keys.file.write_text(replace(keys.good.public, expires=day).line())
        line = keys.good.sign(b"subject")
        if good:
            assert TrustedKeys.read(keys.file).check(line, b"subject") == "ci"
        else:
            with pytest.raises(CacheError, match=f"expired on {day}"):
                TrustedKeys.read(keys.file).check(line, b"subject")


def test_readers_trust_the_old_and_the_next_key_while_keys_change(keys: Keys) -> None:
    following = PrivateKey.generate("ci-next")
    keys.file.write_text(f"{keys.good.public.line()}\n{following.public.line()}\n")
    trusted = TrustedKeys.read(keys.file)
    assert trusted.check(keys.good.sign(b"old"), b"old") == "ci"
    assert trusted.check(following.sign(b"new"), b"new") == "ci-next"
    keys.file.write_text(following.public.line())
    with pytest.raises(CacheError, match="unknown key 'ci'"):
        TrustedKeys.read(keys.file).check(keys.good.sign(b"old"), b"old")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got none"),
        ("ed25519 ci", "expected `ed25519 KEY BASE64"),
        ("ed25519 ci AAAA", "expected 32 bytes"),
        ("rsa ci AAAA", "got 'rsa ci AAAA'"),
        ("ed25519-private ci AAAA", "got 'ed25519-private'"),
        ("ed25519 c/i {key}", "name of letters"),
        ("ed25519 ci {key} expires=soon", "date YYYY-MM-DD"),
        ("ed25519 ci {key} until=2027-01-01", r"\[expires="),
        ("ed25519 ci {key}\ned25519 ci {key}", "twice"),
    ],
)
def test_a_wrong_file_of_keys_is_refused(text: str, message: str, keys: Keys) -> None:
    keys.file.write_text(text.format(key=base64.b64encode(keys.good.public.raw).decode()))
    with pytest.raises(ValidationError, match=message) as caught:
        trust.trusted_keys()
    assert "QUIRE_TRUSTED_KEYS" in str(caught.value)
    assert "ed25519-private ci AAAA" not in str(caught.value), "no private key is printed"


def test_files_of_keys_that_others_can_change_are_refused(keys: Keys, tmp_path: Path) -> None:
    keys.file.chmod(0o666)
    with pytest.raises(ValidationError, match="may be written by others"):
        trust.trusted_keys()
    keys.good.write(tmp_path / "open.key", None)
    (tmp_path / "open.key").chmod(0o644)
    with pytest.raises(ValidationError, match="may be read by others"):
        PrivateKey.read(tmp_path / "open.key")
    with pytest.raises(ValidationError, match="keys are kept"):
        keys.good.write(tmp_path / "open.key", None)


def test_a_missing_library_is_named(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(ValidationError, match=r'pip install "quire-attention\[signing\]"'):
        trust.trusted_keys()


def test_settings_that_contradict_each_other_are_refused(
    keys: Keys, maker: dict[str, str], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_SHARED_CACHE", server.url)
    (tmp_path / "secret").write_text("0123456789abcdef")
    monkeypatch.setenv("QUIRE_SHARED_CACHE_KEY", str(tmp_path / "secret"))
    with pytest.raises(ValidationError, match="both QUIRE_SHARED_CACHE_KEY and QUIRE_TRUSTED_KEYS"):
        tier.shared_tier()
    monkeypatch.delenv("QUIRE_SHARED_CACHE_KEY")
    monkeypatch.setenv("QUIRE_SIGNING_KEY", maker["QUIRE_SIGNING_KEY"])
    keys.file.write_text(keys.unknown.public.line())
    with pytest.raises(ValidationError, match="public half of the key 'ci'"):
        tier.shared_tier()
    keys.file.write_text(replace(keys.good.public, expires=date(2020, 1, 1)).line())
    with pytest.raises(ValidationError, match="the key 'ci' expired on 2020-01-01"):
        tier.shared_tier()
    assert server.asked == []


def test_doctor_says_when_keys_expire(keys: Keys) -> None:
    def found() -> list[tuple[str, str]]:
        return [(one.status, one.text) for one in doctor.examine(jit.user_store()) if one.check == "keys"]

    assert [status for status, _ in found()] == ["ok"]
    keys.file.write_text(replace(keys.good.public, expires=trust._today() + timedelta(days=10)).line())
    assert [status for status, _ in found()] == ["note", "ok"] and "in 10 days" in found()[0][1]
    keys.file.write_text(replace(keys.good.public, expires=date(2020, 1, 1)).line())
    assert [status for status, _ in found()] == ["fault"]


# --- commands --------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status and answer of `quire cache ... --json`."""
    capsys.readouterr()
    status = cli.main(["cache", *arguments, "--json"])
    text = capsys.readouterr().out
    return status, json.loads(text) if text else {}


def test_commands_make_keys_sign_and_verify(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry, other = made(HOST), made(OTHER)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "maker"))
    key, public = tmp_path / "ci.key", tmp_path / "ci.key.pub"
    status, answer = run(capsys, "keygen", str(key), "--expires", "2099-12-31")
    assert (status, answer["key"], stat.S_IMODE(key.stat().st_mode)) == (0, "ci", 0o600)
    assert public.read_text().endswith(" expires=2099-12-31\n")
    assert run(capsys, "sign")[0] == 2, "no key"
    assert run(capsys, "sign", "host", "--key", str(key))[1] == {"entries": 1, "key": "ci"}
    assert run(capsys, "verify", "--keys", str(public))[1] == {"ok": True, "entries": 2, "bad": []}
    status, answer = run(capsys, "verify", "--keys", str(public), "--signed")
    assert status == 1 and [bad["path"] for bad in answer["bad"]] == [str(other.path)]
    assert run(capsys, "verify", "--signed")[0] == 2, "no public keys"
    bundle = str(tmp_path / "bundle.tar")
    assert cli.main(["cache", "export", bundle]) == 0
    status, answer = run(capsys, "verify", bundle, "--keys", str(public))
    assert status == 1 and answer["entries"] == 2
    assert [bad["path"] for bad in answer["bad"]] == [f"{other.slug}/{other.path.name}"]
    assert cli.main(["cache", "import", bundle, "--keys", str(public), "--store", str(tmp_path / "reader")]) == 1
    assert "it is not signed" in capsys.readouterr().err
    assert run(capsys, "sign", "--key", str(key))[1]["entries"] == 2
    assert cli.main(["cache", "export", bundle]) == 0
    assert run(capsys, "verify", bundle, "--keys", str(public))[0] == 0
    assert cli.main(["cache", "import", bundle, "--keys", str(public), "--store", str(tmp_path / "reader")]) == 0
    assert run(capsys, "verify", "--store", str(tmp_path / "reader"), "--keys", str(public), "--signed")[0] == 0
    shutil.copy(other.path / SIGNATURE, tmp_path / "reader/entries" / entry.slug / entry.path.name / SIGNATURE)
    status, answer = run(capsys, "verify", "--store", str(tmp_path / "reader"), "--keys", str(public))
    assert status == 1 and "does not fit" in answer["bad"][0]["error"]


@pytest.mark.parametrize("kind", ["http", "file"])
def test_commands_verify_a_tier_and_sign_it_with_the_next_key(
    kind: str, fake: FakeCompiler, keys: Keys, maker: dict[str, str], server: Server, templates: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, restart: Callable[[], None], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("QUIRE_SHARED_CACHE", server.url if kind == "http" else f"file://{tmp_path}/bucket")
    assert host("maker", monkeypatch, tmp_path, templates, restart, maker) == "built"
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "maker"))
    assert run(capsys, "verify", "--tier") == (0, {"ok": True, "entries": 2, "bad": []})
    following = PrivateKey.generate("ci-next")
    following.write(tmp_path / "next.key", None)
    keys.file.write_text(f"{keys.good.public.line()}\n{following.public.line()}\n")
    monkeypatch.setenv("QUIRE_SIGNING_KEY", str(tmp_path / "next.key"))
    tier._open_tier.cache_clear()
    status, answer = run(capsys, "sign", "--tier")
    assert status == 0 and answer["entries"] >= 2
    keys.file.write_text(following.public.line())
    tier._open_tier.cache_clear()
    assert run(capsys, "verify", "--tier")[1]["ok"]
    assert host("reader", monkeypatch, tmp_path, templates, restart, {}) == "hit"
    if kind == "http":
        objects = [at for at, data in server.objects.items() if b"manifest.json" in data]
        server.objects[objects[0]] = server.objects[objects[1]]
        status, answer = run(capsys, "verify", "--tier")
        assert status == 1 and answer["bad"][0]["path"] == objects[0].rpartition("/")[2]
