"""A process that has imported what ranks need, forks the ranks of its host for each round, and
watches how they end.

It reads a line of JSON for each round from its input, and answers with one: `{"ranks": {"0":
{"lines": [...], "ended": "exit 0"}, ...}, "left": [...]}`. `ended` is `hung` where a rank had to be
killed, although it was not stopped on purpose; `left` names what the round left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import impl.gloo  # noqa: F401  # registers the backend
from ci.soaking.program import STOPPED_S, Rank
from ci.soaking.rounds import Round

LIMIT_S = 100.0  # for a whole round, of which most take a second
_LOOK_AGAIN_S = 0.02


@dataclass
class Child:
    """A rank's process. output: the reading end of its pipe."""

    pid: int
    output: int
    text: bytes = b""
    ended: str = ""
    stopped_at_s: float | None = None


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        before = what_is_there()
        ranks = run(Round.from_plain(asked["round"]), asked["ranks"], asked["port"])
        left = sorted(what_is_there() - before)
        print(json.dumps({"ranks": ranks, "left": left}), flush=True)


def what_is_there() -> set[str]:
    """Descriptors of this process, and shared memory of the machine that pygloo has named."""
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            link = os.readlink(f"/proc/self/fd/{number}")
            descriptors.add(f"descriptor {number} of {link}")
    return descriptors | {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "gloo" in name}


def run(round: Round, ranks: Sequence[int], port: int) -> dict[int, dict[str, Any]]:
    """What became of these ranks of the round."""
    children = {rank: start(round, rank, port) for rank in ranks}
    with selectors.DefaultSelector() as selector:
        watch(children, selector, round.fault.kind)
    return {
        rank: {
            "lines": [json.loads(line) for line in child.text.splitlines()],
            "ended": child.ended,
        }
        for rank, child in children.items()
    }


def watch(children: Mapping[int, Child], selector: selectors.BaseSelector, kind: str) -> None:
    """Until all have ended, or the round's time is over."""
    for child in children.values():
        selector.register(child.output, selectors.EVENT_READ, child)
    until_s = time.monotonic() + LIMIT_S
    while not all(child.ended for child in children.values()):
        read(selector, _LOOK_AGAIN_S)
        for child in children.values():
            look_at(child, kind)
        rest = [child for child in children.values() if not child.ended]
        only_stopped = all(child.stopped_at_s is not None for child in rest)
        if time.monotonic() > until_s or (rest and only_stopped and kind == "stop"):
            for child in rest:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
                child.ended = "stopped" if child.stopped_at_s is not None else "hung"
    while selector.get_map():  # a pipe may hold more than one piece
        read(selector, 1.0)


def read(selector: selectors.BaseSelector, wait_s: float) -> None:
    for key, _ in selector.select(wait_s):
        piece = os.read(key.fd, 1 << 16)
        key.data.text += piece
        if not piece:
            selector.unregister(key.fd)
            os.close(key.fd)


def look_at(child: Child, kind: str) -> None:
    """Notice how it ended, and let it go on after a while if that is its fault."""
    if child.ended:
        return
    pid, status = os.waitpid(child.pid, os.WNOHANG | os.WUNTRACED)
    if pid and os.WIFSTOPPED(status):
        child.stopped_at_s = time.monotonic()
    elif pid:
        code = os.waitstatus_to_exitcode(status)
        child.ended = f"exit {code}" if code >= 0 else signal.Signals(-code).name
    goes_on = kind == "stop and continue"
    since_s = child.stopped_at_s
    if goes_on and since_s is not None and time.monotonic() > since_s + STOPPED_S:
        child.stopped_at_s = None
        os.kill(child.pid, signal.SIGCONT)


def start(round: Round, rank: int, port: int) -> Child:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, reading)
    os.close(reading)
    Rank(round, rank, port, lambda line: write(writing, line)).run()
    os._exit(0)


def write(descriptor: int, line: str) -> None:
    os.write(descriptor, line.encode())


if __name__ == "__main__":
    main()
