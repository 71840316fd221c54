"""What the site takes from sources: torch's files, and excerpts of cases and mutants."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.catalogue.chapters import SPEC
from conformance.site.excerpts import excerpt
from conformance.site.torch_files import TorchFiles
from tests.report.samples import requirement

C10D = "torch/distributed/distributed_c10d.py"
DDP = "torch/nn/parallel/distributed.py"


@pytest.fixture(scope="module")
def files() -> TorchFiles:
    return TorchFiles.installed()


@pytest.mark.parametrize(
    ("source", "id", "profile", "file"),
    [
        ("torch 2.13 docs, new_group", "x/y", "groups", C10D),
        ("torch 2.13 docs, DistributedDataParallel.no_sync", "x/y", "ddp", DDP),
        (
            "torch, reducer.cpp, mark_variable_ready",
            "x/y",
            "ddp",
            "torch/csrc/distributed/c10d/reducer.cpp",
        ),
        (
            "torch/distributed/fsdp/_runtime_utils.py of torch 2.13",
            "x/y",
            "fsdp",
            "torch/distributed/fsdp/_runtime_utils.py",
        ),
        (
            "torch 2.13, _post_backward_hook",
            "x/y",
            "fsdp",
            "torch/distributed/fsdp/_runtime_utils.py",
        ),
        ("pytorch#1", "sync_batchnorm/eval", "sync_batchnorm", "torch/nn/modules/batchnorm.py"),
        ("pytorch#1", "all_reduce/x", "collectives", C10D),
        ("torch 2.13 docs, groups: all ranks of a group call it", "x/y", "p2p", C10D),
        ("torch, test_c10d_common.py, test_x", "x/y", "ddp", DDP),
    ],
)
def test_a_rule_is_about_the_file_that_its_source_names(
    files: TorchFiles, source: str, id: str, profile: str, file: str
) -> None:
    assert files.of(requirement(id, source=source, profile=profile)) == file


def test_an_excerpt_of_a_case_shows_what_its_ranks_do() -> None:
    file = SPEC / "collectives" / "all_reduce.py"
    text = excerpt(file, "test_all_reduce_leaves_the_same_bits_everywhere", with_helpers=True)
    assert "def all_reduced_noise(" in text
    assert text.index("def all_reduced_noise(") < text.index("@chapter.must(")
    alone = excerpt(file, "test_all_reduce_leaves_the_same_bits_everywhere")
    assert "def all_reduced_noise(" not in alone
    assert alone.startswith("@chapter.must(")


def test_helpers_of_helpers_come_once_and_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def a(): b()\n\n\ndef b(): a()\n\n\ndef other(): ...\n\n\ndef test(): a(b)\n")
    text = excerpt(file, "test", with_helpers=True)
    assert text.split() == ["def", "a():", "b()", "def", "b():", "a()", "def", "test():", "a(b)"]
