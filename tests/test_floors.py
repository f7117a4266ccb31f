"""Imports go down only: ARCHITECTURE.md draws the floors, this checks them."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import quire
from quire.jit.unit import root
from quire.kernels import KERNELS

ROOT = Path(quire.__file__).parent
#: Highest floor first. A module may import from its own floor and from those below.
FLOORS = [
    {"__main__", "__init__", "public", "cli", "compat", "distributed"},
    {"attention"},
    {"calls"},
    {"cache"},
    {"engine"},
    {"kernels"},
    {"jit"},
    {"errors"},
]
#: The rooms of C++ headers, lowest first. The rooms of one floor do not include each other.
ROOMS = [{"core"}, {"ptx"}, {"tile/shared"}, {"tile/ampere", "tile/hopper", "tile/cpu"}, {"kernels"}]
HEADERS = sorted(path for path in (root() / "include/quire").rglob("*") if path.is_file())
MODULES = sorted(path for path in ROOT.rglob("*.py") if "templates" not in path.parts)


def floor_of(module: str) -> int:
    top = module.split(".")[0]
    for height, names in enumerate(FLOORS):
        if top in names:
            return height
    raise AssertionError(f"{module} stands on no floor: add it to FLOORS and to ARCHITECTURE.md")


def own_name(path: Path) -> str:
    """The module of a file, without the leading "quire."."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """The modules of Quire that a file imports, without the leading "quire."."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "quire":
            rest = (node.module or "").split(".")[1:]
            found |= {".".join(rest)} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name[6:] for alias in node.names if alias.name.startswith("quire.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for other in imports(path):
        assert floor_of(other) >= floor_of(own), f"{own} imports {other} from a floor above"


def test_no_module_imports_itself_through_others() -> None:
    """A circle of imports at the top of modules; those inside of functions happen later."""
    arrows: dict[str, set[str]] = {}
    names = {own_name(path) for path in MODULES}
    for path in MODULES:
        found = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire"):
                module = (node.module or "").removeprefix("quire").removeprefix(".")
                found |= {f"{module}.{alias.name}".lstrip(".") for alias in node.names} | {module}
        arrows[own_name(path)] = found & names - {own_name(path)}
    for package in {name for name in names if any(other.startswith(f"{name}.") for other in names)}:
        inside = {other for other in arrows[package] if other.startswith(f"{package}.")}
        for name in names:  # whoever imports a part runs the package's own file first, which is no arrow
            if name.startswith(f"{package}."):
                arrows[name] -= {package} if inside else set()
    order = TopologicalSorter(arrows)
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_jit_knows_no_attention_and_no_torch() -> None:
    for path in (ROOT / "jit").glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(name.split(".")[0] == "torch" for name in names | modules), path.name


def test_no_module_above_the_catalogue_names_a_backend() -> None:
    """They ask the row of a kernel for what it can do, and compare it with no name."""
    for path in MODULES:
        if path.relative_to(ROOT).parts[0] == "kernels":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            sides = (node.left, *node.comparators)
            asks = any(isinstance(side, ast.Attribute) and side.attr in ("backend", "name") for side in sides)
            names = {value.value for side in sides for value in ast.walk(side) if isinstance(value, ast.Constant)}
            of_kernels = {kernel.backend for kernel in KERNELS} | {kernel.name for kernel in KERNELS}
            assert not (asks and names & of_kernels), f"{path.name}:{node.lineno} names a backend"


def test_only_config_reads_the_environment() -> None:
    for path in MODULES:
        if path.name == "config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
            assert not reads, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} reads the environment"


def room_of(header: str) -> tuple[int, str]:
    """The floor and the room of a header, named from include/quire on."""
    room = header.rpartition("/")[0]
    for height, rooms in enumerate(ROOMS):
        if room in rooms:
            return height, room
    raise AssertionError(f"{header} stands in no room: add it to ROOMS and to ARCHITECTURE.md")


@pytest.mark.parametrize("path", HEADERS, ids=lambda p: "/".join(p.parts[-2:]))
def test_headers_include_their_room_and_lower_floors(path: Path) -> None:
    own = path.relative_to(root() / "include/quire").as_posix()
    height, room = room_of(own)
    for other in re.findall(r'#include "quire/(.*)"', path.read_text()):
        other_height, other_room = room_of(other)
        assert other_height < height or other_room == room, f"{own} includes {other}"
