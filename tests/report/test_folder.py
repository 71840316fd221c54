"""The folder of a certificate: nothing is lost, and one run at a time writes there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.report.certificate import write_certificate
from conformance.report.folder import (
    INTERRUPTED,
    PARTIAL,
    CertificateFolder,
    FolderInUse,
    aside,
    newest_in,
)
from tests.report.samples import whole_certificate

OURS = "sample"  # the target of `whole_certificate`


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A folder with the results of a whole run."""
    folder = CertificateFolder(tmp_path, OURS)
    write(tmp_path, "earlier")
    folder.settle(whole=True, interrupted=False)
    folder.close()
    return tmp_path


def write(folder: Path, says: str) -> None:
    write_certificate(aside(folder), whole_certificate())
    (aside(folder) / "junit.xml").write_text(says)
    (aside(folder) / "alone").mkdir()
    (aside(folder) / "alone" / f"{says}.py").write_text("")


def contents(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            yield f"{path.relative_to(folder)}: {len(path.read_bytes())}"


def test_a_run_that_writes_nothing_changes_nothing(earlier: Path) -> None:
    before = list(contents(earlier))
    CertificateFolder(earlier, OURS).close()
    assert list(contents(earlier)) == before


def test_nothing_is_replaced_before_the_end(earlier: Path) -> None:
    folder = CertificateFolder(earlier, OURS)
    write(earlier, "later")
    assert (earlier / "junit.xml").read_text() == "earlier"
    assert folder.settle(whole=True, interrupted=False) == earlier
    folder.close()
    assert (earlier / "junit.xml").read_text() == "later"
    assert [path.name for path in (earlier / "alone").iterdir()] == ["later.py"]
    assert not aside(earlier).exists()


@pytest.mark.parametrize(
    ("whole", "interrupted", "name"),
    [(False, False, PARTIAL), (True, True, INTERRUPTED), (False, True, INTERRUPTED)],
)
def test_what_is_not_whole_goes_beside(
    earlier: Path, whole: bool, interrupted: bool, name: str
) -> None:
    before = list(contents(earlier))
    for _ in range(2):
        folder = CertificateFolder(earlier, OURS)
        write(earlier, "later")
        assert folder.settle(whole=whole, interrupted=interrupted) == earlier / name
        folder.close()
    assert (earlier / name / "junit.xml").read_text() == "later"
    assert set(before) <= set(contents(earlier))
    assert newest_in(earlier) == earlier


def test_without_a_whole_run_the_selection_is_read(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path, OURS)
    write(tmp_path, "x")
    folder.settle(whole=False, interrupted=False)
    folder.close()
    assert newest_in(tmp_path) == tmp_path / PARTIAL


def test_a_folder_is_of_one_target(earlier: Path) -> None:
    with pytest.raises(FolderInUse, match="holds the certificate of sample; choose another"):
        CertificateFolder(earlier, "other")
    CertificateFolder(earlier, "other", replace_other=True).close()
    CertificateFolder(earlier, OURS).close()


def test_one_run_at_a_time_and_no_lock_outlives_its_run(tmp_path: Path) -> None:
    text = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from conformance.report.folder import CertificateFolder\n"
        "held = CertificateFolder(Path(sys.argv[1]), 'sample')\n"
        "print('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(FolderInUse, match=f"process {holder.pid} is writing"):
            CertificateFolder(tmp_path, OURS)
        holder.kill()
    CertificateFolder(tmp_path, OURS).close()


def test_what_a_killed_run_left_aside_is_not_taken_for_the_next_ones(tmp_path: Path) -> None:
    CertificateFolder(tmp_path, OURS)  # never closed, as when it is killed
    write(tmp_path, "killed")
    os.unlink(tmp_path / ".lock")
    folder = CertificateFolder(tmp_path, OURS)
    assert list(aside(tmp_path).iterdir()) == []
    folder.close()
