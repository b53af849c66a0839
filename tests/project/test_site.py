"""The built site in a browser: every page in two widths, light and dark. ``make docs-browser`` builds it and runs this.

Nothing scrolls sideways but code and tables by themselves; text is legible; links and anchors lead somewhere; images
load and have words; nothing is asked of another host; no script fails. The site is served as a version of several
(docs/releases.md).
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import pathlib
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any, NamedTuple

import browser
import pytest

pytestmark = pytest.mark.browser

DOCS = pathlib.Path(__file__).parents[2] / "docs"
LOOK = (pathlib.Path(__file__).parents[1] / "look.js").read_text()
WIDTHS, SCHEMES = (400, 1400), {"light": "default", "dark": "slate"}  # those of the system, and ours for them
VERSIONS = [
    {"version": "dev", "title": "dev", "aliases": []},
    {"version": "0.1", "title": "0.1", "aliases": ["latest"]},
]
TASKS = 5  # of the home page, each a card


class Seen(NamedTuple):
    """A page: its links, the names of its anchors, and what is wrong with it."""

    links: list[str]
    anchors: set[str]
    faults: list[str]


class Handler(http.server.SimpleHTTPRequestHandler):
    """The site under ``/dev/``, beside the list of versions that mike writes."""

    def do_GET(self) -> None:
        if self.path == "/versions.json":
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(VERSIONS).encode())
        elif self.path.startswith("/dev/"):
            self.path = self.path.removeprefix("/dev")
            super().do_GET()
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> pathlib.Path:
    """The folder of the built site."""
    site = pathlib.Path(str(request.config.getoption("--site")))
    if not (site / "index.html").exists():
        pytest.skip(f"no site is built in {site}: make docs-browser builds one")
    return site


@pytest.fixture(scope="module")
def chromium(folder) -> Iterator[browser.Chromium]:
    path = browser.found()
    if path is None:
        pytest.skip(f"no Chromium on this machine: none of {', '.join(browser.NAMES)} is a command")
    with browser.Chromium(path) as chromium:
        yield chromium


@contextlib.contextmanager
def served(folder: pathlib.Path) -> Iterator[str]:
    """Serves a site, and yields its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/dev/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def root(folder) -> Iterator[str]:
    """The address of the site."""
    with served(folder) as address:
        yield address


def of_events(events: list[tuple[str, dict[str, Any]]], root: str) -> Iterator[str]:
    """Yields what a page's events say is wrong."""
    host = urllib.parse.urlsplit(root).netloc
    for name, event in events:
        if name == "Runtime.exceptionThrown":
            yield f"a script threw: {event['exceptionDetails'].get('exception', event['exceptionDetails'])}"
        elif name == "Runtime.consoleAPICalled" and event["type"] in ("error", "assert"):
            yield f"a script reported: {[arg.get('value') for arg in event['args']]}"
        elif name == "Log.entryAdded" and event["entry"]["level"] == "error":
            yield f"{event['entry']['text']} {event['entry'].get('url', '')}"
        elif name == "Network.requestWillBeSent":
            asked = urllib.parse.urlsplit(event["request"]["url"])
            if asked.scheme.startswith("http") and asked.netloc != host:
                yield f"asks another host: {event['request']['url']}"


def look_at(chromium: browser.Chromium, root: str, address: str) -> Seen:
    """Looks at a page in each width and scheme."""
    chromium.look(WIDTHS[-1], "light")
    chromium.open(root + address)
    links = chromium.run("[...document.querySelectorAll('a[href]:not(.md-version__link)')].map(link => link.href)")
    anchors = chromium.run("[...document.querySelectorAll('[id]')].map(element => element.id)")
    faults = []
    for scheme, ours in SCHEMES.items():
        for width in WIDTHS:
            chromium.look(width, scheme)
            chromium.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            found = chromium.run(LOOK)
            if chromium.run("document.body.dataset.mdColorScheme") != ours:
                found["scheme"] = ["another than the system's"]
            faults += [f"{width} px, {scheme}: {kind}: {what}" for kind in found for what in found[kind]]
    return Seen(links, set(anchors), [*faults, *of_events(chromium.events, root)])


@pytest.fixture(scope="module")
def seen(chromium, folder, root) -> dict[str, Seen]:
    """Every page, by its address below the root."""
    addresses = (path.relative_to(folder).as_posix().removesuffix("index.html") for path in folder.rglob("*.html"))
    # Links of 404.html begin with a slash: it is served for any address.
    return {address: look_at(chromium, root, address) for address in sorted(addresses) if address != "404.html"}


def test_pages_look_well(seen):
    assert {f"{page.stem}/" for page in DOCS.glob("*.md") if page.stem != "index"} < seen.keys()
    faults = [f"{address}: {fault}" for address, page in seen.items() for fault in page.faults]
    assert not faults, "\n".join(dict.fromkeys(faults))


def test_links_lead_somewhere(seen, folder, root):
    """Those to other sites are left alone."""
    broken = set()
    for address, page in seen.items():
        for link in page.links:
            if not link.startswith(root):
                if link.startswith(("http://127.", "file:")):
                    broken.add(f"{address}: {link} is outside of the site")
                continue
            path, _, anchor = link.removeprefix(root).partition("#")
            path = urllib.parse.unquote(path.partition("?")[0])
            if path not in seen:
                if not (folder / path).is_file():
                    broken.add(f"{address}: no page {path}")
            elif anchor and urllib.parse.unquote(anchor) not in seen[path].anchors:
                broken.add(f"{address}: {path} has no #{anchor}")
    assert not broken, "\n".join(sorted(broken))


@pytest.mark.parametrize("width", WIDTHS)
def test_tasks_are_seen_at_once(chromium, root, width):
    """The home page's cards are whole in the first window, on a telephone in the first two."""
    chromium.look(width, "light")
    chromium.open(root)
    cards = ".md-typeset .grid.cards > ul > li"
    ends = chromium.run(f"[...document.querySelectorAll('{cards}')].map(card => card.getBoundingClientRect().bottom)")
    assert len(ends) == TASKS
    assert max(ends) <= (900 if width > 1000 else 1800)


def test_a_word_is_found(chromium, root):
    chromium.look(1400, "light")
    chromium.open(f"{root}?q=reduce-scatter")
    found = """new Promise(done => {
      const look = left => {
        const titles = [...document.querySelectorAll('.md-search-result__item h1')].map(title => title.textContent)
        titles.length || !left ? done(titles) : setTimeout(look, 100, left - 1)
      }
      look(200)
    })"""
    assert "Many devices" in chromium.run(found)


def test_versions_are_offered(chromium, root):
    chromium.look(1400, "light")
    chromium.open(root)
    offered = """new Promise(done => {
      const look = left => {
        const names = [...document.querySelectorAll('.md-version__link')].map(link => link.textContent.trim())
        names.length || !left ? done(names) : setTimeout(look, 100, left - 1)
      }
      look(200)
    })"""
    assert [name.split()[0] for name in chromium.run(offered)] == [version["title"] for version in VERSIONS]


def test_faults_are_found(chromium, tmp_path):
    """A page with one of each."""
    (tmp_path / "index.html").write_text("""<body data-md-color-scheme="default" style="background: white">
        <p style="width: 500px">wide</p> <p style="color: #999">faint</p> <img src="none.png" width="9" height="9">
        <svg role="img"><rect width="200" height="100" fill="#333"/><text x="9" y="50" fill="#000">black</text></svg>
        <article><svg role="img"></svg></article> <img src="https://example.invalid/x.png" alt="x">
        <script>console.error("wrong"); nothing.at.all</script>""")
    with served(tmp_path) as root:
        found = "\n".join(look_at(chromium, root, "").faults)
    for fault in (
        "400 px, light: wide: the page is",
        "1400 px, light: faint: p. in body.: 2.85",
        "faint: text. in svg.: 1.66",
        "images: http://127.0.0.1",
        'nameless: <svg role="img">',
        "1400 px, dark: scheme",
        "404",
        "a script threw: ",
        "a script reported: ['wrong']",
        "asks another host: https://example.invalid",
    ):
        assert fault in found
    assert "1400 px, light: wide" not in found
