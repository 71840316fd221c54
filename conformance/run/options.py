"""Table of a run's command line options, for pytest and for `python -m conformance certify`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.harness.launcher import LAUNCHERS
from conformance.rule import GROUPS
from conformance.run.settings import DEADLINE_S, REPETITIONS

# Flag -> how argparse and pytest are told of it.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--target": {
        "default": "impl",
        "metavar": "NAME",
        "help": "impl, torch, PATH.toml or module:attribute; A@B for A's wrappers on B's backend "
        "(default: %(default)s)",
    },
    "--world-sizes": {
        "metavar": "N,...",
        "help": "world sizes to run, up to 64 (default: the cases decide)",
    },
    "--profile": {
        "metavar": "NAME,...",
        "help": f"only requirements of these profiles, or of groups: {', '.join(GROUPS)}",
    },
    "--requirement": {
        "action": "append",
        "default": [],
        "metavar": "ID,...",
        "help": "only these requirements; patterns such as 'all_reduce/*'; may be repeated",
    },
    "--certificate": {
        "metavar": "DIR",
        "help": "write certificate.json, junit.xml and a report there; {target} in it stands for "
        "the target's name",
    },
    "--replace-other-target": {
        "action": "store_true",
        "help": "write the certificate to a folder that holds that of another target",
    },
    "--device": {
        "metavar": "NAME",
        "help": "cpu, or another type of device that torch knows (default: the target's)",
    },
    "--repetitions": {
        "type": int,
        "default": REPETITIONS,
        "metavar": "N",
        "help": "how often a failed case is repeated, each time on fresh ranks, before its "
        "requirement is called broken (default: %(default)s)",
    },
    "--launcher": {
        "choices": LAUNCHERS,
        "default": LAUNCHERS[0],
        "help": "how this process was started as one of several ranks: auto for torchrun or "
        "mpirun, slurm for srun, none for neither (default: %(default)s)",
    },
    "--budget": {
        "metavar": "TIME",
        "help": "start no case after this time, such as 60s or 5m, and until then first those that "
        "check most requirements; the run says what it left out",
    },
    "--cases-per-rule": {
        "type": int,
        "metavar": "N",
        "help": "run only so many cases that each requirement has N, if it has as many, at two "
        "ranks if it can be; the run says what it left out (default: all)",
    },
    "--seed": {
        "type": int,
        "metavar": "N",
        "help": "have drawn cases draw other examples than in every run, by this number",
    },
    "--fuzz": {
        "type": float,
        "metavar": "MINUTES",
        "help": "run drawn cases alone, for about so long, with one seed after the other from "
        "--seed on (default: 0); what fails is shown with its seed",
    },
    "--deadline": {
        "type": float,
        "default": DEADLINE_S,
        "metavar": "SECONDS",
        "help": "how long the ranks may take for one call (default: %(default)s)",
    },
}
