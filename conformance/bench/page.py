"""One page of all measurements in a folder: `bench.html`, which needs no other file.

python -m conformance.bench.page build/bench
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

PAGE = "bench.html"


def write_page(folder: Path) -> None:
    """Of each `bench.json` in the folder and in folders in it, and the picture beside it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    files = (*folder.glob("bench.json"), *sorted(folder.glob("*/bench.json")))
    measured = [_measured(file) for file in files]
    (folder / PAGE).write_text(environment.get_template("bench.html").render(measured=measured))


def _measured(file: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(file.read_text())
    picture = file.with_name("bench.svg").read_text()
    # what precedes it, as an XML declaration, has no place inside of a page
    return {**read, "picture": picture[picture.index("<svg") :]}


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
