# SPDX-License-Identifier: Apache-2.0
"""The chat page: files of the package, sent as they are. The page asks nothing but this server."""

from __future__ import annotations

from functools import cache
from importlib import resources

from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = {"/": "index.html", "/page/page.css": "page.css", "/page/page.js": "page.js", "/page/icon.svg": "icon.svg"}
"""Each path, and its file in the folder ``web``."""

_HEADERS = {
    # No script or style but these files, no frame around the page, and nothing sent anywhere else.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def _data(name: str) -> bytes:
    return (resources.files(__package__) / "web" / name).read_bytes()


def page_file(path: str) -> Response:
    """The file at one of FILES."""
    name = FILES[path]
    kind = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
    return Response(_data(name), headers={**_HEADERS, "Content-Type": kind})
