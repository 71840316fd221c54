"""`ci/soak`: random programs of collectives with random faults, for some minutes.

    ci/soak                                  # 20 minutes, 4 ranks, pygloo's transports in turns
    ci/soak --minutes 5 --seed 7 --transports shm,mixed
    ci/soak --backend gloo                   # torch's C++ gloo in the same rounds
    ci/soak --seed 7 --transports shm --only 123        # one round again

In each round all ranks run the same drawn program, and one of them has a fault: it is killed, is
stopped (for a while or for good), exits, raises, aborts or destroys its group, is slow or late, or
lacks descriptors or memory for a new group; or the store is lost. Every result is checked. All
other ranks have to raise an error in time if a rank is gone, and must not notice what is harmless.

`mixed` puts the ranks on two hosts: namespaces of processes and networks, which share no memory.
The cable between them is cut, for a while or for good. It needs root, iproute2 and util-linux. Exit
code: 0 if all was well, 1 if not, 2 for bad usage. A fault that did not come is not well either.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ci.soaking.host import LIMIT_S
from ci.soaking.judging import Verdict, judge
from ci.soaking.link import INTERFACES, NEEDED, Link, enter_own_network
from ci.soaking.program import CUT_SEEN, CUT_THE_LINK, LOSE_THE_STORE, store_address
from ci.soaking.rounds import LINK_MENDED, Round, draw

TRANSPORTS = ("shm", "tcp", "gloo", "mixed")
_SHOWN = 20
_LOOK_AGAIN_S = 0.05
_CUT_S = 0.5
_OWN_PROCESSES = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


class Hosts:
    """One process for each host, which forks its ranks."""

    def __init__(self, transport: str, world_size: int) -> None:
        self._store: dist.TCPStore | None = None  # of the round
        self._secret = secrets.token_hex()
        self._folder = tempfile.TemporaryDirectory(prefix="soak-")
        self._cut_seen = Path(self._folder.name, "cut")
        self.count = 2 if transport == "mixed" else 1
        self.ranks = [list(range(i, world_size, self.count)) for i in range(self.count)]
        self._processes = [self._start(host) for host in range(self.count)]
        self._link = Link(self._processes[1].pid) if self.count > 1 else None

    def _start(self, host: int) -> subprocess.Popen[str]:
        prefix: tuple[str, ...] = ()
        if self.count > 1:
            prefix = (*_OWN_PROCESSES, "--net") if host else _OWN_PROCESSES
        interface = INTERFACES[host] if self.count > 1 else "lo"
        quiet = {"TORCH_CPP_LOG_LEVEL": "FATAL"}  # many a rank loses a peer
        secret = {"PYGLOO_SECRET": self._secret}  # or there is a warning for each group
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "ci.soaking.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **quiet,
                **secret,
                **os.environ,
                "GLOO_SOCKET_IFNAME": interface,
                CUT_SEEN: str(self._cut_seen),
            },
        )

    def run(self, round: Round) -> Verdict:
        self._cut_seen.unlink(missing_ok=True)
        address = store_address(round)
        store = self._store = dist.TCPStore(address, 0, None, True, wait_for_workers=False)
        for process, ranks in zip(self._processes, self.ranks, strict=True):
            assert process.stdin is not None
            asked = {"round": round.to_plain(), "ranks": ranks, "port": store.port}
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        del store  # so that it goes when `_answers` lets go of it
        answers = list(self._answers(round.fault.kind))
        told = {int(rank): it for answer in answers for rank, it in answer["ranks"].items()}
        return judge(round, told, sorted({name for answer in answers for name in answer["left"]}))

    def _answers(self, kind: str) -> Iterator[Any]:
        """One line of each host. The store goes, or the link is cut, when a rank says so."""
        selector = selectors.DefaultSelector()
        for process in self._processes:
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ)
        until_s = time.monotonic() + LIMIT_S + 20.0
        cut_at_s: float | None = None
        while selector.get_map():
            for key, _ in selector.select(_LOOK_AGAIN_S):
                selector.unregister(key.fileobj)
                yield json.loads(key.fileobj.readline())  # type: ignore[union-attr]  # a text file
            now_s = time.monotonic()
            if kind == "store lost" and self._is_told(LOSE_THE_STORE):
                self._store = None
            if self._link is not None and cut_at_s is None and self._is_told(CUT_THE_LINK):
                self._link.cut()
                cut_at_s = now_s
            is_cut = cut_at_s is not None and now_s > cut_at_s + _CUT_S and self._cut_seen.exists()
            if is_cut and kind == LINK_MENDED:
                self._mend()
                cut_at_s = math.inf
            if now_s > until_s:
                raise SystemExit("ci/soak: a host does not answer")
        self._mend()

    def _is_told(self, key: str) -> bool:
        return self._store is not None and self._store.check([key])

    def _mend(self) -> None:
        if self._link is not None:
            self._link.mend()

    def close(self) -> None:
        for process in self._processes:
            process.communicate()
        self._folder.cleanup()


class Tally:
    """What the rounds of one transport came to."""

    def __init__(self) -> None:
        self.rounds, self.steps, self.latest_s = 0, 0, 0.0
        self.faults: Counter[str] = Counter()
        self.named: Counter[str] = Counter()
        self.wrong: list[str] = []

    def add(self, round: Round, verdict: Verdict) -> None:
        self.rounds += 1
        self.steps += verdict.steps
        self.faults[round.fault.kind] += verdict.fired
        self.named += verdict.named
        self.latest_s = max(self.latest_s, verdict.latest_s)
        fault = f"{round.fault.kind} of rank {round.fault.rank} at step {round.fault.at}"
        self.wrong += [f"--only {round.number} ({fault}): {wrong}" for wrong in verdict.wrong]

    def lines(self) -> Iterator[str]:
        faults = ", ".join(f"{kind} {n}" for kind, n in self.faults.items())
        yield f"{self.rounds} rounds, {self.steps} steps right"
        yield f"{self.faults.total()} faults: {faults}"
        named = ", ".join(f"{whom} {n}" for whom, n in self.named.items()) or "nothing"
        yield f"errors of survivors name: {named}; the last came after {self.latest_s:.1f} s"
        yield f"wrong: {len(self.wrong)}"
        yield from self.wrong[:_SHOWN]


def main() -> int:
    arguments = parse(sys.argv[1:])
    names = arguments.transports.split(",") if arguments.backend == "pygloo" else [""]
    if "mixed" in names:
        lacking = [command for command in NEEDED if shutil.which(command) is None]
        if os.geteuid() != 0 or lacking:
            needs = f"root, and the commands {', '.join(NEEDED)}"
            print(f"ci/soak: mixed needs {needs}; name other --transports", file=sys.stderr)
            return 2
        try:
            enter_own_network()
        except OSError as error:
            print(f"ci/soak: mixed needs a network of its own: {error}", file=sys.stderr)
            return 2
    hosts = {name: Hosts(name, arguments.ranks) for name in names}
    tallies = {name: Tally() for name in names}
    until_s = time.monotonic() + 60 * arguments.minutes
    try:
        for number in [arguments.only] if arguments.only is not None else count():
            for name in names:
                transport = "auto" if name == "mixed" else name
                drawn = draw(
                    arguments.seed,
                    number,
                    arguments.backend,
                    transport,
                    arguments.ranks,
                    hosts[name].count,
                )
                tallies[name].add(drawn, hosts[name].run(drawn))
            if time.monotonic() > until_s:
                break
    except KeyboardInterrupt:
        print("interrupted")
    for name, tally in tallies.items():
        title = " ".join(filter(None, (arguments.backend, name)))
        print("\n".join([f"== {title}, seed {arguments.seed}", *tally.lines()]))
    for each in hosts.values():
        each.close()
    return int(any(tally.wrong for tally in tallies.values()))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--backend", choices=("pygloo", "gloo"), default="pygloo")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), metavar="T,...")
    parser.add_argument("--only", type=int, metavar="N", help="this round, once")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
