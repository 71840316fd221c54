"""How a process ends that has used a group and destroyed it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from conformance import Chapter, Me, Ranks, assert_that, deadline, not_probed, world_sizes
from conformance.spec.groups.stores import tcp_store
from conformance.spec.waiting import all_are_here
from conformance.target import resolve

chapter = Chapter("groups")

LIMIT_S = 60.0
PROGRAM = "from conformance.spec.groups.process_end import program_of_a_rank; program_of_a_rank()"
# What MPI sets in processes that it has started, which cannot start others that use MPI.
OF_MPI = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}


def program_of_a_rank() -> None:
    """The program of one rank, in a process of its own."""
    told = json.loads(sys.argv[1])
    for module in told["imports"]:
        importlib.import_module(module)
    store = dist.TCPStore(told["host"], told["port"], wait_for_workers=False, use_libuv=False)
    dist.init_process_group(
        told["backend"],
        store=store,
        rank=told["rank"],
        world_size=told["world_size"],
        timeout=timedelta(seconds=told["timeout_s"]),
        pg_options=resolve(told["options"])() if told["options"] else None,
    )
    x = torch.ones(2, device=told["device"])
    dist.all_reduce(x)
    dist.destroy_process_group()
    print(f"it has reduced {x.tolist()}, and destroyed the group", flush=True)


def run_a_program(me: Me) -> tuple[str, str]:
    """How it ended, and what it has printed. Of a process that MPI has started: "", ""."""
    if OF_MPI & os.environ.keys():
        return "", ""
    store = tcp_store(me, "")
    told = {
        "imports": me.target.imports,
        "backend": me.target.backend,
        "options": me.target.options,
        "device": str(me.device),
        "host": me.host,
        "port": int(me.store.get("port")),
        "rank": me.rank,
        "world_size": me.world_size,
        "timeout_s": me.group_timeout_s,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(told)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
        how, printed = f"exit code {done.returncode}", done.stdout + done.stderr[-2000:]
    except subprocess.TimeoutExpired as over:
        how, printed = f"still running after {LIMIT_S:.0f} s", str(over.stdout)
    all_are_here(me, "seen the end of its program")
    del store
    return how, printed


@chapter.must(
    "destroy/process-ends",
    "A process that has destroyed its groups ends when its program is over, with exit code 0.",
    source="torch 2.13 docs, Distributed communication package, Shutdown",
    rests_on="destroy/one-group",
)
@not_probed()
@world_sizes(2)
@deadline(LIMIT_S + 30)
def test_a_program_ends(bare_ranks: Ranks) -> None:
    got = bare_ranks.run(run_a_program)
    if got == [("", "")] * bare_ranks.world_size:
        pytest.skip("a process that MPI has started cannot start others that use MPI")
    for rank, (how, printed) in enumerate(got):
        assert_that(how == "exit code 0", f"the program of rank {rank}: {how}\n{printed}", rank)
