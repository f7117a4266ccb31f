"""The pages of docs/: each block of Python runs, prints what the page says, and quotes are what the files have."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urljoin
from xml.etree import ElementTree

import pytest
import torch

import browser
import feature_matrix
import quire

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: A block, its kind and title, and the block of text behind it, which is what it prints.
BLOCKS = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?', re.MULTILINE | re.DOTALL)
RUN = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def blocks(page: Path) -> list[tuple[str, str, str, str]]:
    return BLOCKS.findall(page.read_text(encoding="utf-8"))


def test_there_are_pages() -> None:
    assert len(RUN) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(DOCS)))
def test_python_runs_and_prints_what_the_page_says(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names: dict[str, object] = {}
    for number, (kind, title, code, printed) in enumerate(blocks(page)):
        if kind != "python" or title:
            continue
        file = tmp_path / f"block{number}.py"  # some errors show lines of the caller's file
        file.write_text(code, encoding="utf-8")
        exec(compile(code, str(file), "exec"), names)
        said = capsys.readouterr().out
        assert not printed or said.split() == printed.split(), code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_quotes_are_in_the_files_that_they_name(page: Path) -> None:
    for _, title, code, _ in blocks(page):
        if title:
            assert code in (ROOT / title).read_text(encoding="utf-8"), f"{title} no longer has:\n{code}"


def test_pictures_are_well_formed_and_used() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for picture in (DOCS / "pictures").glob("*.svg"):
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")
        assert f'"{picture.name}"' in text, f"no page shows {picture.name}"
    for figure in (DOCS / "figures").glob("*.svg"):
        assert f"figures/{figure.name}" in text, f"no page shows {figure.name}"


@pytest.mark.skipif(not quire.jit.host_target().startswith("x86-64"), reason="the picture is of an x86-64 host")
def test_the_picture_of_the_schedule_is_what_its_page_draws() -> None:
    page = DOCS / "concepts" / "schedule.md"
    names: dict[str, object] = {}
    for kind, _, code, _ in blocks(page):
        if kind == "python":
            exec(compile(code, str(page), "exec"), names)
    assert names["picture"].svg == (DOCS / "pictures" / "schedule.svg").read_text(encoding="utf-8")


def test_the_picture_of_serving_is_what_its_page_draws() -> None:
    page = DOCS / "tutorial" / "serve.md"
    names: dict[str, object] = {}
    for kind, _, code, _ in blocks(page):
        if kind == "python":
            exec(compile(code, str(page), "exec"), names)
    assert f"{names['picture']}\n" == (DOCS / "pictures" / "serving.svg").read_text(encoding="utf-8")
    first = next(code for kind, _, code, _ in blocks(page) if kind == "python")
    assert len(first.splitlines()) <= 80


def test_the_matrix_is_what_the_kernels_say() -> None:
    assert feature_matrix.PAGE.read_text(encoding="utf-8") == feature_matrix.page(), "run tests/feature_matrix.py"


@pytest.mark.parametrize("notebook", [*DOCS.rglob("*.ipynb")], ids=lambda path: path.name)
def test_notebooks_run(notebook: Path) -> None:
    found = json.loads(notebook.read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    codes = ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]
    assert len(codes) >= 5 and all(not cell.get("outputs") for cell in found["cells"])
    for number, code in enumerate(codes):
        exec(compile(code, f"{notebook.name}:{number}", "exec"), names)


# --- troubleshooting -------------------------------------------------------------------------------------------------

TROUBLE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
SOURCES = " ".join(
    "".join(path.read_text(encoding="utf-8") for path in Path(quire.__file__).parent.rglob("*.py")).split()
)


@pytest.mark.parametrize("name", [name for name in quire.errors.__all__ if name != "QuireError"])
def test_each_error_has_its_section_and_names_it(name: str) -> None:
    assert re.search(rf"^## {name}$", TROUBLE, re.MULTILINE)
    if sys.version_info >= (3, 11):
        assert getattr(quire.errors, name)("text").__notes__ == [f"See docs/troubleshooting.md#{name.lower()}"]
        assert str(getattr(quire.errors, name)("text")) == "text"


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(quire.errors.CacheMissError("text")))
    assert str(error) == "text" and len(getattr(error, "__notes__", ["1"])) == 1


def test_texts_of_errors_are_those_of_the_sources() -> None:
    """What a row of a table quotes, up to where a number or a name stands in it."""
    sections = re.findall(r"^## (\w+Error)\n(.*?)(?=^## )", TROUBLE, re.MULTILINE | re.DOTALL)
    quotes = [quote for _, text in sections for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
              for quote in re.findall(r"`([^`]+)`", row)]  # fmt: skip
    of_others = {"CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_ILLEGAL_ADDRESS", "failed with", "TypeError"}
    joined = re.sub(r'" f?"', "", SOURCES)
    missing = [quote for quote in quotes if quote not in of_others and quote not in joined]
    assert len(quotes) > 40 and not missing, missing


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    modules = {name for name in quire.__all__ if type(getattr(quire, name)).__name__ in ("module", "CallableModule")}
    missing = [
        name
        for name in set(quire.__all__) - modules
        if f".{name}\n" not in pages and f"quire.{name}`" not in pages and not hasattr(quire.errors, name)
    ]
    assert sorted(missing) == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It builds without a warning."""
    pytest.importorskip("mkdocstrings", reason="make docs installs it")
    place = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.slow
def test_the_site_opens_from_disk(site: Path) -> None:
    """It loads nothing from elsewhere, and each of its own files is there."""
    pages = [*site.rglob("*.html")]
    assert len(pages) > len(PAGES)
    loads = re.compile(r'<(?:script|img|link)\b[^>]*?(?:src|href)="(?!data:)([^"?#]+)')
    for page in pages:
        found = loads.findall(page.read_text(encoding="utf-8"))
        is_alone = page.name == "404.html"  # which is shown in place of any page
        assert is_alone != any(name.endswith("iframe-worker.js") for name in found) and is_alone == (not found)
        for loaded in found:
            assert not loaded.startswith(("http", "//", "/")), f"{page.name} loads {loaded}"
            assert (page.parent / loaded).exists(), f"{page.name} has no {loaded}"


@pytest.mark.slow
def test_a_browser_shows_all_of_each_page(site: Path) -> None:
    """Nothing is wider than a desk's or a phone's screen but tables and code that scroll, and no code at a desk."""
    if browser.browser() is None:
        pytest.skip("no Chromium on PATH")
    found = browser.findings(site)
    assert not found, "\n".join(map(str, found[:30]))


@pytest.mark.slow
def test_a_browser_finds_what_is_cut(tmp_path: Path) -> None:
    if browser.browser() is None:
        pytest.skip("no Chromium on PATH")
    (tmp_path / "404.html").write_text("nothing")
    (tmp_path / "index.html").write_text(
        '<div style="width: 500px">too wide for a phone</div><pre style="overflow: auto"><code style="display: block; '
        f'overflow: auto">{"x" * 400}</code></pre><table style="width: 50px"><td><code style="word-break: break-all">'
        "BatchDecodeWrapper</code></table><img src=gone.png>"
    )
    found = {(width, what) for page, width, what, *_ in browser.findings(tmp_path) if page == "/index.html"}
    everywhere = {(width, what) for width in browser.WIDTHS for what in ("a broken word", "no picture")}
    assert found == {*everywhere, (1280, "code is cut"), (390, "beyond the edge"), (390, "the page is wider")}


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["/gone.html", "/tutorial/gone/deeper.html", "/reference/gone.html"])
@pytest.mark.parametrize("prefix", ["", "/some/prefix"])
def test_the_page_of_what_is_not_found_leads_home(site: Path, prefix: str, missing: str) -> None:
    if browser.browser() is None:
        pytest.skip("no Chromium on PATH")
    with browser.served(site, prefix) as address:
        link = re.search(r'id="home" href="([^"]+)"', browser.dom(f"{address}{missing}"))
        assert link is not None
        assert urljoin(f"{prefix}{missing}", link.group(1)) == f"{prefix}/index.html"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_fits_its_box(page: Path) -> None:
    """100 columns; what quotes a file has that file's."""
    for kind, title, code, _ in blocks(page):
        if kind != "text" and not title:
            assert max(map(len, code.splitlines()), default=0) <= 96, f"{page.name}: {max(code.splitlines(), key=len)}"


def test_docstrings_become_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("griffe", reason="make docs installs it")
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    from docstrings import Parameter, markdown

    parameters = {"q": Parameter("Tensor | None", "None"), "k": Parameter("Tensor", "")}
    text = "Write.\n\nq, k [nnz]: the *rows*,\n    all.\nReturns o.\n\n>>> f([1])\n[1]"
    lines = markdown(text, parameters).splitlines()
    assert [line for line in lines if line and "---" not in line] == [
        "Write.", "| argument | type | default | |",
        "| `q`<br>`k [nnz]` | `Tensor | None`<br>`Tensor` | `None`<br>&nbsp; | the \\*rows\\*, all. |",
        "Returns o.", "```pycon", ">>> f([1])", "[1]", "```"
    ]  # fmt: skip
    text = "Write.\n\nq: [rows, 8]; k [nnz]: a key. It\nis read. Other arguments: as there. q,\nk: both.\n\n>>> q: 1"
    lines = markdown(text, parameters).splitlines()
    assert [line.rpartition(" | ")[2] for line in lines if line.startswith("| `")] == [
        r"\[rows, 8]. |", "a key. It is read. |", "both. |"
    ]  # fmt: skip
    assert "Other arguments: as there." in lines
    code = ">>> call(" + ", ".join(f"argument_{i}={i}" for i in range(12)) + ")  # and why\n12"
    lines = markdown(code).splitlines()
    assert lines[2:4] == [">>> # and why", "... call("] and lines[-2:] == ["12", "```"]
    assert max(map(len, lines)) <= 96 and len(lines) == 9
