"""Mutants of conformance/spec/ddp/logging.py."""

from __future__ import annotations

from typing import Any

from impl.ddp import DistributedDataParallel
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.wrapper.logging_data import Logger
from tests.mutants.ddp.kit import DDPMutant, afterwards, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/logging/construction", says="world_size: got")
class LogsAnotherWorldSize(DDPMutant):
    @staticmethod
    def _spoil(logger: Logger, *_: Any) -> None:
        logger._data.ints_map["world_size"] += 1

    patched = afterwards(Logger, "set_construction_data_and_log", _spoil)


@breaks("ddp/logging/steps", says="rebuilt_bucket_sizes")
class LogsNoSizes(DDPMutant):
    @staticmethod
    def _spoil(logger: Logger) -> None:
        logger._data.strs_map.pop("rebuilt_bucket_sizes", None)

    patched = afterwards(Logger, "set_runtime_stats_and_log", _spoil)


@breaks("ddp/logging/sample-rate", says="data of steps|was to raise")
class LogsAtOneRate(DDPMutant):
    patched = instead(Reducer, "_set_ddp_runtime_logging_sample_rate", lambda self, rate: None)


@breaks("ddp/logging/of-one-step", says="unused bytes and buckets")
class AddsStatisticsUp(DDPMutant):
    @staticmethod
    def _adding(right: Any) -> Any:
        def log(self: Logger) -> None:
            before = self._data.ints_map.get("num_buckets_reduced", 0)
            right(self)
            if "num_buckets_reduced" in self._data.ints_map:
                self._data.ints_map["num_buckets_reduced"] += before

        return log

    patched = swap(Logger, "set_runtime_stats_and_log", _adding)


@breaks("ddp/logging/errors", says="has_error|KeyError")
class LogsNoErrors(DDPMutant):
    patched = instead(Logger, "set_error_and_log", lambda self, error: None)


def _raise_alone(_: Any, err_type: type[Exception], err_msg: str) -> None:
    raise err_type(err_msg)


@breaks("ddp/logging/errors", says="has_error is 0")
class LogsNoRefusals(DDPMutant):
    """What the wrapper itself refuses is not recorded; what its reducer finds is."""

    patched = instead(DistributedDataParallel, "_log_and_throw", _raise_alone)
