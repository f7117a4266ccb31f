"""What a reader's browser does with the pages of a site: headless Chromium measures them, at the width of a desk and of
a phone.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell"
WIDTHS = 1280, 390  #: pixels

#: Loads each page in a frame of each width, and lists [page, width, what, ...] of all that is not as it should be.
_PROBE = """<!doctype html><body><pre id="out"></pre><script>
const found = [], pages = PAGES, widths = WIDTHS;
function scroller(element, frame) {
  for (let at = element.parentElement; at && at.tagName !== "BODY"; at = at.parentElement)
    if (["auto", "scroll"].includes(frame.getComputedStyle(at).overflowX)) return at;
}
function look(page, width, doc, frame) {
  const note = (...what) => found.push([page, width, ...what]);
  if (doc.documentElement.scrollWidth > width + 1) note("the page is wider", doc.documentElement.scrollWidth);
  for (const element of doc.querySelectorAll("body *")) {
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || (box.right <= width + 1 && box.left >= -1)) continue;
    if (element.closest(".md-sidebar, .md-header, .md-overlay, .md-top, [hidden]")) continue;
    const place = scroller(element, frame);
    if (place && (place.closest("pre, .md-typeset__scrollwrap, .md-tabs") || place.tagName === "CODE")) continue;
    note("beyond the edge", element.tagName, box.left, box.right, element.textContent.slice(0, 40));
  }
  for (const code of doc.querySelectorAll("pre > code")) {
    const isCut = width > 1000 && code.scrollWidth > code.clientWidth + 1;
    const isQuote = code.closest(".highlight")?.querySelector(".filename");
    if (isCut && !isQuote) note("code is cut", code.textContent);
  }
  for (const code of doc.querySelectorAll("td code")) {
    const isWord = !/[\\s\\-\\/,.=]/.test(code.textContent);
    if (isWord && code.getClientRects().length > 1) note("a broken word", code.textContent);
  }
  for (const image of doc.querySelectorAll("img"))
    if (frame.getComputedStyle(image).display !== "none" && !image.naturalWidth) note("no picture", image.src);
}
async function main() {
  for (const page of pages) for (const width of widths) {
    const frame = document.createElement("iframe");
    frame.style.width = width + "px"; frame.style.height = "900px"; frame.src = page;
    document.body.append(frame);
    await new Promise((done) => { frame.onload = done; });
    await new Promise((done) => setTimeout(done, 150));
    look(page, width, frame.contentDocument, frame.contentWindow);
    frame.remove();
  }
  document.getElementById("out").textContent = JSON.stringify(found);
}
main();
</script>"""


def browser() -> str | None:
    """A headless Chromium on PATH."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@contextmanager
def served(site: Path, prefix: str = "") -> Iterator[str]:
    """The address of a server of this folder under a prefix, whose pages of errors are the site's 404.html."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def translate_path(self, path: str) -> str:
            return super().translate_path(path.removeprefix(prefix) if path.startswith(prefix) else "/nowhere")

        def send_error(self, code: int, *_: Any, **__: Any) -> None:
            body = (site / "404.html").read_bytes()
            self.send_response(code)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{prefix}"
    finally:
        server.shutdown()
        server.server_close()


def dom(address: str, seconds: int = 5) -> str:
    """The page of an address after its scripts have run."""
    program = browser()
    assert program is not None
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom"]
    command += [f"--virtual-time-budget={1000 * seconds}", address]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=500).stdout


def findings(site: Path) -> list[list[Any]]:
    """What is not as it should be on the pages of a site."""
    pages = sorted(f"/{page.relative_to(site)}" for page in site.rglob("*.html"))
    probe = site / "probe.html"
    probe.write_text(_PROBE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS)), encoding="utf-8")
    try:
        with served(site) as address:
            text = dom(f"{address}/probe.html", seconds=len(pages) * 5)
    finally:
        probe.unlink()
    answer = re.search(r'<pre id="out">(.*?)</pre>', text, re.DOTALL)
    assert answer is not None and answer.group(1), "the probe has not ended"
    found: list[list[Any]] = json.loads(html.unescape(answer.group(1)))
    return found
