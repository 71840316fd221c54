"""Cases for accelerators can be followed: on a host without streams, on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

import conformance.spec.accelerator
from conformance.report.results import Results
from conformance.run.first_look import FirstLook
from conformance.session.certifier import Certifier
from conformance.verdict import Verdict
from tests.mutants.any_machine import AnyMachine

CASES = Path(conformance.spec.accelerator.__file__).parent

# What only a device can show: it has memory that is not the host's.
NEED_A_DEVICE = {"cuda/mixed-devices", "cuda/other-device"}

SIMULATED = "tests.impl.device.targets:simulated"

# SyncBatchNorm takes the simulated device for the CPU, and prepares its statistics on the host.
NOT_SIMULATED = {"cuda/sync-batchnorm"}


_NEITHER = "not host_and_device and not several_devices"
_ELSEWHERE = {
    "impl": _NEITHER,
    SIMULATED: f"{_NEITHER} and not sync_batchnorm and not int64 and not bfloat16",
}


class Keeper(AnyMachine):
    """Runs gpu cases on whatever there is, and keeps the results."""

    results: Results | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        certifier = session.config.pluginmanager.get_plugin("conformance-certifier")
        assert isinstance(certifier, Certifier)
        self.results = certifier.results


@pytest.mark.parametrize("target", ["impl", SIMULATED])
def test_cases_hold_without_a_device(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.session.certifier.look_at", lambda target: FirstLook(""))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # some warn, which is an error here
    keeper = Keeper()
    pytest.main(
        [
            *(str(CASES), "--target", target, "--world-sizes", "2", "--profile", "accelerator"),
            *("-k", _ELSEWHERE[target], "--deadline", "120"),
            *("-o", "addopts=", "-p", "no:terminal", "-p", "no:xdist", "-p", "no:cacheprovider"),
            *("--assert", "plain", "-s"),
        ],
        plugins=[keeper],
    )
    assert keeper.results is not None
    judged = {r.requirement.id: r for r in keeper.results.requirements}
    left_out = NEED_A_DEVICE | (NOT_SIMULATED if target == SIMULATED else set())
    for id, result in judged.items():
        if result.requirement.profile != "accelerator" or id in left_out:
            continue
        assert result.verdict is Verdict.HOLDS, f"{id}: {result.verdict} {result.reason}"
