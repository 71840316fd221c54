"""One page of all measurements in a folder: `bench.html`, which needs no other file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

PAGE = "bench.html"


def write_page(folder: Path) -> None:
    """Of what each `<folder>/*/bench.json` and the picture beside it say."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    measured = [_measured(file) for file in sorted(folder.glob("*/bench.json"))]
    (folder / PAGE).write_text(environment.get_template("bench.html").render(measured=measured))


def _measured(file: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(file.read_text())
    picture = file.with_name("bench.svg").read_text()
    # what precedes it, as an XML declaration, has no place inside of a page
    return {**read, "picture": picture[picture.index("<svg") :]}
