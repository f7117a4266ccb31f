"""The remote cache tier: real servers, faulty ones, hostile objects, and three hosts that need one compile."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from object_server import Server
from processes import Child
from scale import HOST, Collect, FakeCompiler

from quire import jit
from quire.errors import CacheError, CacheMissError, ValidationError
from quire.jit import archive, doctor, tier

SECRET = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def tiers() -> Iterator[None]:
    """No tier remembers the failures of another test."""
    tier._open_tier.cache_clear()
    yield
    tier._open_tier.cache_clear()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, key: Path) -> Callable[..., None]:
    """Configure the tier at a URL, with a key unless `unsigned`."""

    def use(url: str, *, unsigned: bool = False, **more: str) -> None:
        for name in [name for name in os.environ if name.startswith("QUIRE_SHARED_")]:
            monkeypatch.delenv(name)
        trust = {"TRUST": "unsigned"} if unsigned else {"KEY": str(key)}
        monkeypatch.setenv("QUIRE_SHARED_CACHE", url)
        for name, value in {**trust, **more}.items():
            monkeypatch.setenv(f"QUIRE_SHARED_CACHE_{name}", value)

    return use


@pytest.fixture
def host(
    templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: Callable[[], None]
) -> Callable[..., tuple[str, jit.Entry]]:
    """Build on a host of this name: a process that remembers nothing, with a cache of its own."""

    def host(name: str, spec: jit.Spec = HOST) -> tuple[str, jit.Entry]:
        restart()
        monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / name))
        return jit.build(spec, templates=templates)

    return host


Host = Callable[..., tuple[str, jit.Entry]]


def entries(server: Server) -> list[str]:
    """The paths of objects that hold entries."""
    return [path for path, data in server.objects.items() if b"manifest.json" in data]


# --- what it is for --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conditional", [True, False])
def test_what_one_host_compiles_the_others_read(
    fake: FakeCompiler, use: Callable[..., None], host: Host, conditional: bool
) -> None:
    with Server(conditional=conditional) as server:
        use(server.url)
        assert host("one")[0] == "built"
        assert len(entries(server)) == 2, "under the toolchain's name and under that of the request"
        status, entry = host("two")
        assert (status, fake.compiles) == ("hit", 1)
        assert entry.path.parents[2].name == "two"
        server.shutdown()


def test_names_are_what_bazel_servers_take(fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server):
    use(server.url)
    host("one")
    for path in server.objects:
        prefix, _, name = path.rpartition("/")
        assert prefix == "/ac"
        assert len(bytes.fromhex(name)) == 32


def test_a_hit_in_the_users_cache_asks_nobody(fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server):
    use(server.url)
    host("one")
    host("two")
    server.asked.clear()
    assert host("one")[0] == host("two")[0] == "hit"
    assert server.asked == []


def test_a_host_without_a_compiler_reads_what_any_toolchain_made(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server.url)
    host("one")
    monkeypatch.setenv("QUIRE_JIT", "deny")
    monkeypatch.setenv("QUIRE_CXX", "/nowhere/g++")
    assert host("two")[0] == "hit"
    server.objects.clear()
    with pytest.raises(CacheMissError, match="quire warmup"):
        host("three")


def test_another_compiler_compiles_and_adds_its_own(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server
) -> None:
    use(server.url)
    host("one")
    fake.write(version="2.0")
    assert host("two")[0] == "built"
    assert len(entries(server)) == 3, "one for each toolchain; the first keeps the name of the request"


def test_objects_are_never_overwritten(fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server):
    use(server.url)
    host("one")
    (request,) = [path.name for path in Path(os.environ["QUIRE_CACHE_DIR"]).glob("entries/*/*")]
    for digest in (request.split("-")[1], None):
        server.objects["/ac/" + tier.object_name(request.split("-")[0], digest)] = b"somebody's"
    before = dict(server.objects)
    with Collect() as lines:
        assert host("two")[0] == "built"
    assert server.objects == before
    assert len([line for line in lines if "ignored the object" in line]) == 1


@pytest.mark.parametrize("conditional", [True, False])
def test_an_http_object_is_added_once(conditional: bool) -> None:
    """By the condition of the PUT, or on a server that does not know it by asking first."""
    with Server(conditional=conditional) as server:
        remote = tier._HttpServer(server.url)
        assert remote.add("a" * 64, b"first")
        assert not remote.add("a" * 64, b"second")
        assert remote.read("a" * 64) == b"first"
        server.shutdown()


def test_read_only_mode_writes_nothing(fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server):
    use(server.url, MODE="read")
    assert host("one")[0] == "built"
    assert {method for method, _ in server.asked} == {"GET"}
    use(server.url)
    assert host("two")[0] == "built"
    use(server.url, MODE="read")
    assert host("three")[0] == "hit"


def test_a_read_only_cache_takes_it_for_this_process(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server, tmp_path: Path
) -> None:
    use(server.url)
    host("one")
    (tmp_path / "two").write_text("no directory")
    assert host("two")[0] == "hit"
    assert fake.compiles == 1


def test_passwords_go_to_the_server_alone(fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server):
    use(server.url.replace("http://", "http://user:secret@"))
    server.status = 302
    with Collect() as lines:
        assert host("one")[0] == "built"
    assert server.headers[0]["Authorization"] == "Basic dXNlcjpzZWNyZXQ="
    assert any("302" in line for line in lines)
    assert not any("secret" in line for line in lines)


# --- servers that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 403, 500, 503])
def test_an_error_is_a_miss_and_one_warning(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server, status: int
) -> None:
    use(server.url)
    server.status = status
    with Collect() as lines:
        assert host("one")[0] == "built"
    assert len([line for line in lines if "shared cache" in line]) == 1
    assert len(server.asked) == 1, "a server that has failed is left alone"


def test_a_server_that_has_failed_is_asked_again_after_a_minute(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server.url)
    host("one")
    server.status = 500
    host("two")
    server.status = None
    now = time.monotonic()
    clock = type("Clock", (), {"monotonic": lambda: now + 59, "sleep": time.sleep, "time": time.time})
    monkeypatch.setattr(tier, "time", clock)
    assert host("three")[0] == "built"
    clock.monotonic = lambda: now + 61
    assert host("four")[0] == "hit"


def test_a_dead_server_costs_nothing_but_the_compile(
    fake: FakeCompiler, use: Callable[..., None], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server() as server:
        server.shutdown()
    use(server.url)
    for limit in ("LIMIT_SECONDS", "PATIENCE_SECONDS"):
        monkeypatch.setattr(tier, limit, 60.0)
    start = time.monotonic()
    assert host("one")[0] == "built"
    assert time.monotonic() - start < 60.0, "it waited for the server"


def test_a_slow_server_is_given_up(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server.url)
    server.delay = 30.0
    monkeypatch.setattr(tier, "LIMIT_SECONDS", 0.2)
    start = time.monotonic()
    assert host("one")[0] == "built"
    assert time.monotonic() - start < server.delay, "it waited for the server"


def test_a_process_ends_while_an_operation_hangs(server: Server) -> None:
    server.delay = 30.0
    code = f"""
from quire.jit import tier
tier.LIMIT_SECONDS = 0.2
print(tier.Tier({server.url!r}, tier._HttpServer({server.url!r}), None).problem())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert "Timeout" in done.stdout or "timed out" in done.stdout


def test_a_truncated_body_is_a_miss(fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server):
    use(server.url)
    host("one")
    server.truncate = True
    with Collect() as lines:
        assert host("two")[0] == "built"
    assert any("shared cache" in line for line in lines)


class Faulty:
    """A remote that fails, lies and forgets at random points."""

    def __init__(self, seed: int) -> None:
        self.objects: dict[str, bytes] = {}
        self.random = random.Random(seed)

    def _maybe_fail(self) -> None:
        if self.random.random() < 0.3:
            raise self.random.choice((OSError(5, "I/O error"), TimeoutError(), ValueError("odd"), MemoryError()))

    def read(self, name: str) -> bytes | None:
        self._maybe_fail()
        data = self.objects.get(name)
        if data and self.random.random() < 0.3:
            damaged = bytearray(data)
            damaged[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            return bytes(damaged[: self.random.choice((len(data), len(data) // 2))])
        return data

    def add(self, name: str, data: bytes) -> bool:
        self._maybe_fail()
        if name in self.objects:
            return False
        self.objects[name] = data if self.random.random() < 0.8 else data[: len(data) // 3]
        self._maybe_fail()  # after the write
        return True


@pytest.mark.parametrize("seed", range(10))
def test_faults_at_random_points_cost_compiles_and_nothing_else(
    fake: FakeCompiler, host: Host, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    remote = Faulty(seed)
    monkeypatch.setattr(tier, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(tier, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(jit, "_shared_tier", lambda: tier.Tier("faulty://", remote, SECRET))
    contents = set()
    for number in range(5):
        _, entry = host(f"host{number}")
        contents.add(entry.artifact.read_bytes())
        assert jit.Store(entry.path.parents[2]).verify(entry.path)
    assert len(contents) == 1
    assert 1 <= fake.compiles <= 5


# --- trust -----------------------------------------------------------------------------------------------------------


def test_a_tier_without_a_key_is_refused(fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server, key):
    use(server.url, KEY="")
    with pytest.raises(ValidationError, match=r"QUIRE_SHARED_CACHE_KEY .* or QUIRE_SHARED_CACHE_TRUST=unsigned"):
        host("one")
    use(server.url, TRUST="unsigned")
    with pytest.raises(ValidationError, match="both"):
        host("one")
    key.write_text("short")
    use(server.url)
    with pytest.raises(ValidationError, match="at least 16 bytes"):
        host("one")
    use(server.url, KEY="/nowhere/key")
    with pytest.raises(ValidationError, match="/nowhere/key"):
        host("one")
    assert server.asked == []


@pytest.mark.parametrize("forge", ["unsigned", "other key", "changed", "other name", "no header", "empty"])
def test_forged_objects_are_never_loaded(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server, forge: str
) -> None:
    """Somebody who writes to the server but has no key: 0 loads."""
    use(server.url)
    host("one")
    for path in entries(server):
        data = server.objects[path]
        _, _, body = data.partition(b"\n")
        name = path.rpartition("/")[2]
        server.objects[path] = {
            "unsigned": tier.Tier("", Faulty(0), None)._signed(name, body),
            "other key": tier.Tier("", Faulty(0), b"x" * 32)._signed(name, body),
            "changed": data[:-2000] + bytes([data[-2000] ^ 1]) + data[-1999:],
            "other name": tier.Tier("", Faulty(0), SECRET)._signed("0" * 64, body),
            "no header": body,
            "empty": b"",
        }[forge]
    with Collect() as lines:
        assert host("two")[0] == "built"
    assert fake.compiles == 2
    assert any("ignored the object" in line for line in lines)


def test_unsigned_objects_by_explicit_choice(fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server):
    use(server.url, unsigned=True)
    host("one")
    assert host("two")[0] == "hit"
    use(server.url)
    assert host("three")[0] == "built", "with a key they are refused"


def files_of(entry: jit.Entry) -> dict[str, bytes]:
    return {f"entries/{entry.slug}/{entry.path.name}/{file.name}": file.read_bytes() for file in entry.path.iterdir()}


def pack(files: dict[str, bytes], **kind: object) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as writer:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for attribute, value in kind.items():
                setattr(member, attribute, value)
            writer.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def extended(kind: bytes, payload: bytes, size: int | None = None) -> bytes:
    """A header of another header, as pax and GNU tar write, and its content. `size`: what the header says."""
    member = tarfile.TarInfo("extended")
    member.type, member.size = kind, len(payload) if size is None else size
    return member.tobuf(tarfile.GNU_FORMAT) + payload + b"\0" * (-len(payload) % 512)


#: Archives that tarfile reads slowly, into much memory, or with an error that is not its own.
EXTENDED = {
    "a pax length": extended(tarfile.XHDTYPE, b"99999999999999999999 a=b\n"),
    "a global pax length": extended(tarfile.XGLTYPE, b"99999999999999999999 a=b\n"),
    "a pax header": extended(tarfile.XHDTYPE, b"12 path=abc\n"),
    "a long name": extended(tarfile.GNUTYPE_LONGNAME, b"x" * 600),
    "a long link": extended(tarfile.GNUTYPE_LONGLINK, b"x" * 600),
    "a name of 3 GiB": extended(tarfile.GNUTYPE_LONGNAME, b"\0" * 4096, 3 << 30),
    "a negative size": extended(tarfile.REGTYPE, b"", -512),
    "a sparse file": extended(tarfile.GNUTYPE_SPARSE, b""),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", EXTENDED)
def test_archives_with_other_headers_are_refused(name: str, compressed: bool, tmp_path: Path) -> None:
    """Before their content is read: it may be as large as the header says."""
    path, data = tmp_path / "cache.tar", EXTENDED[name] + pack({})
    path.write_bytes(gzip.compress(data) if compressed else data)
    with pytest.raises(CacheError, match=r"is refused: expected plain files .* without headers of pax or GNU tar"):
        archive.import_entries(path, jit.Store(tmp_path / "store"))
    assert not list((tmp_path / "store/staging").iterdir())


def test_archives_beyond_the_limits_are_refused(
    fake: FakeCompiler, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, second = host("one")[1], host("one", replace(HOST, slug="scale.other"))[1]
    path, target = tmp_path / "cache.tar.gz", jit.Store(tmp_path / "store")
    archive.export_entries([entry, second], path)
    for limit, value in (("_MOST_ENTRIES", 1), ("_LARGEST_ENTRY", 999), ("_MOST_BYTES", 999), ("_MOST_FILES", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(archive, limit, value)
            with pytest.raises(CacheError, match=r"at most 1 entries|too large"):
                archive.import_entries(path, target)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-10240]))
    with pytest.raises(CacheError, match="expected a file of `quire cache export`, got one with EOFError"):
        archive.import_entries(path, target)
    assert list(target.entries()) == []


@pytest.mark.parametrize(
    "hostile",
    ["traversal", "absolute", "link", "other entry", "two", "none", "compressed", "huge", "many", "apart", *EXTENDED],
)
def test_hostile_objects_of_a_signer_write_nothing_outside(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server, tmp_path: Path, hostile: str
) -> None:
    """The signature is right, the archive is not."""
    use(server.url)
    _, entry = host("one")
    other = replace(HOST, slug="scale.other")
    _, second = host("one", other)
    good = f"entries/{entry.slug}/{entry.path.name}"
    manifest = (entry.path / "manifest.json").read_bytes()
    body = {
        "traversal": lambda: pack({"entries/../../evil": b"x"}),
        "absolute": lambda: pack({str(tmp_path / "evil"): b"x"}),
        "link": lambda: pack({f"{good}/manifest.json": b""}, type=tarfile.SYMTYPE, linkname=str(tmp_path / "evil")),
        "other entry": lambda: archive.pack(second),
        "two": lambda: pack(files_of(entry) | files_of(second)),
        "none": lambda: pack({}),
        "compressed": lambda: gzip.compress(archive.pack(entry)),
        "huge": lambda: pack({f"{good}/manifest.json": manifest.replace(b'"size": ', b'"size": 9999')}),
        "many": lambda: pack({f"entries/{number}/a/b": b"" for number in range(2_000)}),
        "apart": lambda: pack({**files_of(entry), "entries/a/b/c": b"", f"{good}/more": b""}),
        **{name: lambda data=data: data + archive.pack(entry) for name, data in EXTENDED.items()},
    }[hostile]()
    for digest in (entry.path.name.split("-")[1], None):
        name = tier.object_name(entry.path.name.split("-")[0], digest)
        server.objects[f"/ac/{name}"] = tier.Tier("", Faulty(0), SECRET)._signed(name, body)
    compiles = fake.compiles
    with Collect() as lines:
        assert host("two")[0] == "built"
    assert fake.compiles == compiles + 1
    assert any("ignored the object" in line for line in lines)
    assert not (tmp_path / "evil").exists()
    assert not list((tmp_path / "two/staging").iterdir())


def test_a_second_entry_of_an_object_is_not_unpacked(
    fake: FakeCompiler, host: Host, templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, second = host("one")[1], host("one", replace(HOST, slug="scale.other"))[1]
    made: list[Path] = []
    check = archive._check
    monkeypatch.setattr(archive, "_check", lambda *given: made.append(given[0]) or check(*given))
    request = jit.make_request(HOST, templates)
    both = io.BytesIO(pack(files_of(entry) | files_of(second)))
    with pytest.raises(CacheError, match="expected at most 1 entries"):
        archive.import_entries(both, jit.Store(tmp_path / "store"), only=request)
    assert len(made) == 1


@pytest.mark.parametrize("error", [OverflowError, RuntimeError, AttributeError])
def test_whatever_an_object_causes_is_a_miss(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server, monkeypatch: pytest.MonkeyPatch, error
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("odd")

    use(server.url)
    host("one")
    monkeypatch.setattr(tier, "import_entries", fail)
    with Collect() as lines:
        assert host("two")[0] == "built"
    assert any("ignored the object" in line and "odd" in line for line in lines)


def test_an_entry_that_no_archive_holds_is_not_offered(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server
) -> None:
    use(server.url)
    with Collect() as lines:
        assert host("one", replace(HOST, slug="s" * 190))[0] == "built"
    assert any("is not added to the shared cache" in line for line in lines)


def test_an_object_beyond_the_limit_is_not_read(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server.url)
    host("one")
    monkeypatch.setattr(tier, "LARGEST_OBJECT", 1000)
    with Collect() as lines:
        assert host("two")[0] == "built"
    assert any("too large" in line for line in lines)


# --- implementations of fsspec ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["file", "plain path", "memory"])
def test_file_systems_of_fsspec(
    fake: FakeCompiler, use: Callable[..., None], host: Host, tmp_path: Path, scheme: str
) -> None:
    fsspec = pytest.importorskip("fsspec")
    bucket = tmp_path / "bucket"
    url = {"file": f"file://{bucket}", "plain path": str(bucket), "memory": f"memory://{tmp_path.name}"}[scheme]
    use(url)
    assert host("one")[0] == "built"
    assert host("two")[0] == "hit"
    assert fake.compiles == 1
    files, root = fsspec.core.url_to_fs(url)
    assert len(files.ls(root)) == 3, "two names of the object and one claim, nothing unfinished"
    for remote in (tier._FileSystem(url),):
        assert remote.add("a" * 64, b"first")
        assert not remote.add("a" * 64, b"second")
        assert remote.read("a" * 64) == b"first"
        assert remote.read("b" * 64) is None


def test_a_missing_package_is_named(fake: FakeCompiler, use: Callable[..., None], host: Host, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    use("file:///tmp/somewhere")
    with pytest.raises(CacheError, match=r"pip install \"quire-attention\[fleet\]\""):
        host("one")
    monkeypatch.undo()


def test_an_unknown_protocol_is_refused(fake: FakeCompiler, use: Callable[..., None], host: Host):
    pytest.importorskip("fsspec")
    use("nosuch://bucket")
    with pytest.raises(CacheError, match="nosuch"):
        host("one")


@pytest.mark.slow
def test_the_s3_server_of_moto(fake: FakeCompiler, use: Callable[..., None], host: Host, monkeypatch):
    """Objects that are added once, by the client that users have."""
    threaded = pytest.importorskip("moto.server", reason="moto[server] is not installed").ThreadedMotoServer
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = threaded(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        address, port = server.get_host_and_port()
        for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1",
                            "ENDPOINT_URL": f"http://{address}:{port}"}.items():  # fmt: skip
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setattr(tier, "LIMIT_SECONDS", 60.0)  # moto starts slowly
        s3fs.S3FileSystem().mkdir("bucket")
        use("s3://bucket/quire")
        assert host("one")[0] == "built"
        assert host("two")[0] == "hit"
        assert fake.compiles == 1
        remote = tier._FileSystem("s3://bucket/quire")
        assert remote.add("a" * 64, b"first")
        assert not remote.add("a" * 64, b"second")
        assert remote.read("a" * 64) == b"first"
        assert remote.read("b" * 64) is None
    finally:
        server.stop()


# --- three hosts -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of Python 3.12 on: the server is a thread
def test_three_hosts_compile_a_key_once(
    fake: FakeCompiler, use: Callable[..., None], templates: Path, tmp_path: Path, server: Server, monkeypatch
) -> None:
    """All miss at once: one has the claim and compiles, the others wait for its object."""
    use(server.url)
    fake.write(before="sleep 0.4")
    start = time.time() + 0.5

    def run(name: str) -> Callable[[], list[str]]:
        def build() -> list[str]:
            os.environ["QUIRE_CACHE_DIR"] = str(tmp_path / name)
            time.sleep(max(0.0, start - time.time()))
            status, entry = jit.build(HOST, templates=templates)
            return [status, hashlib.sha256(entry.image).hexdigest(), str(entry.path.parents[2])]

        return build

    children = [Child(run(f"host{number}")) for number in range(3)]
    results = [child.result() for child in children]
    assert sorted(status for status, *_ in results) == ["built", "hit", "hit"]
    assert fake.compiles == 1
    assert len({digest for _, digest, _ in results}) == 1
    assert len({root for *_, root in results}) == 3


def test_a_claim_of_a_host_that_died_costs_a_short_wait(
    fake: FakeCompiler, use: Callable[..., None], host: Host, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server.url)
    monkeypatch.setattr(tier, "PATIENCE_SECONDS", 0.3)
    host("one")
    for path in entries(server):
        del server.objects[path]
    start = time.monotonic()
    assert host("two")[0] == "built"
    assert 0.3 <= time.monotonic() - start < tier.CLAIM_SECONDS, "it waited until the claim was too old"
    monkeypatch.setattr(tier, "CLAIM_SECONDS", 0.0)
    monkeypatch.setattr(tier, "PATIENCE_SECONDS", 60.0)
    for path in entries(server):
        del server.objects[path]
    assert host("three")[0] == "built", "an old claim counts no more"


@pytest.mark.parametrize("store", ["http", "file"])
@pytest.mark.parametrize("note", ["old", "invalid"])
def test_one_host_takes_over_the_claim_of_one_that_died(
    store: str, note: str, server: Server, templates: Path, tmp_path: Path
) -> None:
    """All find the old claim at once: one takes it over, and the others find a recent one."""
    if store == "file":
        pytest.importorskip("fsspec")
    remote = tier._HttpServer(server.url) if store == "http" else tier._FileSystem(f"file://{tmp_path}/bucket")
    hosts = [tier.Tier(server.url, remote, SECRET) for _ in range(6)]
    request, barrier = jit.make_request(HOST, templates), threading.Barrier(len(hosts))
    name = tier.object_name(request.digest, "digest", "claim")
    remote.add(name, hosts[0]._signed(name, b"1000.0") if note == "old" else b"somebody's")

    def claim(host: tier.Tier) -> bool:
        barrier.wait()
        return host.claim(request, "digest")

    with ThreadPoolExecutor(len(hosts)) as pool:
        assert sorted(pool.map(claim, hosts)) == [False] * 5 + [True]


def test_claims_of_hosts_that_died_are_followed_up_to_a_limit(templates: Path) -> None:
    remote = Faulty(0)
    remote._maybe_fail = lambda: None  # type: ignore[method-assign]
    remote.random = random.Random(1)
    remote.random.random = lambda: 0.5  # type: ignore[method-assign]
    host, request = tier.Tier("", remote, SECRET), jit.make_request(HOST, templates)
    for number in range(tier._MOST_CLAIMS):
        assert host.claim(request, "digest")
        assert not host.claim(request, "digest")
        name = tier.object_name(request.digest, "digest", f"claim {number}" if number else "claim")
        remote.objects[name] = host._signed(name, b"1000.0")
    assert host.claim(request, "digest"), "after so many hosts that died, this one compiles"
    assert len(remote.objects) == tier._MOST_CLAIMS


# --- the other layers ------------------------------------------------------------------------------------------------


def test_the_store_of_the_machine_is_read_and_not_written(
    fake: FakeCompiler, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host("system")
    monkeypatch.setenv("QUIRE_SYSTEM_CACHE", str(tmp_path / "system"))
    before = sorted((tmp_path / "system").rglob("*"))
    status, entry = host("user")
    assert (status, fake.compiles) == ("hit", 1)
    assert tmp_path / "system" in entry.path.parents
    assert sorted((tmp_path / "system").rglob("*")) == before
    assert not (tmp_path / "user").exists()


def test_packages_of_the_entry_point_group_are_read_without_running_their_code(
    fake: FakeCompiler, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host("one")
    site = tmp_path / "site"
    (site / "acme_kernels").mkdir(parents=True)
    (site / "acme_kernels/__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "one").rename(site / "acme_kernels/store")
    (site / "acme_kernels-1.dist-info").mkdir()
    (site / "acme_kernels-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1\n")
    (site / "acme_kernels-1.dist-info/entry_points.txt").write_text("[quire.stores]\nacme = acme_kernels\n")
    monkeypatch.syspath_prepend(str(site))
    status, entry = host("two")
    assert (status, fake.compiles) == ("hit", 1)
    assert site in entry.path.parents


def test_the_users_cache_comes_first_and_its_damage_is_told(
    fake: FakeCompiler, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host("system")
    host("user")
    monkeypatch.setenv("QUIRE_SYSTEM_CACHE", str(tmp_path / "system"))
    assert tmp_path / "user" in host("user")[1].path.parents
    next((tmp_path / "user").glob("entries/*/*/manifest.json")).write_text("{}")
    with Collect() as lines:
        assert tmp_path / "system" in host("user")[1].path.parents
    assert len([line for line in lines if "ignored the cache entry" in line]) == 1


# --- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_says_how_the_tier_is(use: Callable[..., None], server: Server, cache: Path) -> None:
    def shared() -> list[doctor.Finding]:
        return [found for found in doctor.examine(jit.user_store()) if found.check == "shared cache"]

    assert shared() == []
    use(server.url)
    assert [found.status for found in shared()] == ["ok"]
    server.status = 503
    (found,) = shared()
    assert found.status == "fault"
    assert "503" in found.text
    use(server.url, KEY="")
    (found,) = shared()
    assert "QUIRE_SHARED_CACHE_TRUST=unsigned" in found.text
    assert json.dumps(server.asked).count("PUT") == 0
