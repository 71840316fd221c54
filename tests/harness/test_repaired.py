"""The rules that torch's own code breaks on every backend can be kept, all at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

import conformance.spec
from conformance.verdict import Verdict
from tests.harness.kit import run_inside

RULES = {
    "collectives": (
        *("functional/pending/saved", "functional/pending/dropped", "functional/pending/exported"),
        *("functional/coalesced-lists", "functional/broadcast-gradient"),
        *("functional/permuted-shapes", "functional/every-form-of-groups"),
        "functional/unknown-ranks",
    ),
    "companions": (
        *("averaging/gradients-on-some-ranks", "local_sgd/step-hooks"),
        *("zero/no-such-rank", "zero/load-leaves-its-argument"),
    ),
    "distributed_checkpoint": (
        *("dcp/numbers-for-keys", "dcp/no-checkpoint-is-named", "dcp/flipped-bits"),
        *("dcp/torn-overwrite", "dcp/state-dict/before-the-first-step"),
    ),
    "tensor_parallel": (
        *("tp/desired-layout", "tp/own-data-of-the-module", "tp/tied", "tp/loss/images"),
        *("tp/loss/weighted-and-ignored", "tp/loss/other-losses", "tp/loss/ends"),
    ),
    "dtensor": (
        *("dtensor/numbers-of-sums", "dtensor/operators/running-from-the-end"),
        *("dtensor/operators/mean-losses", "dtensor/operators/cut-convolutions"),
        *("dtensor/gradients/largest", "dtensor/in-place/sums", "dtensor/in-place/pieces"),
        *("dtensor/random/shards", "dtensor/random/factories"),
    ),
    "pipeline": (
        *("pipeline/accumulated", "pipeline/tied-stages", "pipeline/statistics"),
        *("pipeline/frozen-first-stage-without-bubbles", "pipeline/after-an-exception"),
        *("pipeline/eval-of-a-v", "pipeline/eval-without-target"),
        *("pipeline/uneven-batch", "pipeline/other-batch-size"),
    ),
    "compile": ("compile/equal-inputs",),
}
SPEC = Path(conformance.spec.__file__).parent


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("profile", RULES)
def test_nothing_is_held_against_repaired_code(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.target.deviations_of_front_end", lambda: ())
    rules = RULES[profile]
    target = f"tests.mutants.{profile}.kit:Repaired.target"
    options = ("--target", target, "--requirement", ",".join(rules))
    run = run_inside(tmp_path, *options, paths=[str(SPEC / profile)])
    assert run.results is not None
    seen = {r.requirement.id: r.verdict for r in run.results.requirements if r.cases}
    assert seen == dict.fromkeys(rules, Verdict.HOLDS)
