"""Mutants of conformance/spec/ddp/separate_programs.py."""

from __future__ import annotations

from typing import Any

from impl.ddp.wrapper import api
from tests.mutants.ddp.kit import DDPMutant, swap
from tests.mutants.kit import breaks


def _in_the_order_of_a_set(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        buckets, limits = right(*args)
        by_text = {str(bucket): bucket for bucket in buckets}
        return [by_text[text] for text in set(by_text)], limits

    return wrong


@breaks("ddp/separate-programs", says=r"the program of rank|is wrong")
class BucketsAreInTheOrderOfASet(DDPMutant):
    patched = swap(api, "compute_bucket_assignment_by_size", _in_the_order_of_a_set)
