"""The base of mutants of a flight recorder: `impl`, whose recordings are changed when asked for."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

from conformance.target import Target, load_target
from impl.gloo import flight_recorder
from tests.mutants.kit import Mutant


class RecordingMutant(Mutant):
    base = "impl"

    @classmethod
    def target(cls) -> Target:
        return replace(
            load_target(cls.base),
            name=cls.__name__,
            flight_recorder=f"{cls.__module__}:{cls.__qualname__}.dump",
            deviations=(),
        )

    @classmethod
    def dump(cls, *asked: bool) -> bytes:
        recording = pickle.loads(flight_recorder.dump(*cls.really_asked(*asked)))
        return pickle.dumps(cls.changed(recording))

    @classmethod
    def dump_json(cls, *asked: bool) -> bytes:
        return json.dumps(cls.changed(json.loads(flight_recorder.dump_json(*asked)))).encode()

    @staticmethod
    def really_asked(*asked: bool) -> tuple[bool, ...]:
        return asked

    @classmethod
    def changed(cls, recording: dict[str, Any]) -> dict[str, Any]:
        """Each entry is changed in its place, unless a mutant changes more."""
        for entry in recording.get("entries", ()):
            cls.change(entry)
        return recording

    @staticmethod
    def change(entry: dict[str, Any]) -> None:
        """Of one call."""


class StatusMutant(RecordingMutant):
    """Changes the status of each group."""

    @classmethod
    def changed(cls, recording: dict[str, Any]) -> dict[str, Any]:
        for status in recording["pg_status"].values():
            cls.change(status)
        return recording


class GroupMutant(RecordingMutant):
    """Changes what is told of each group."""

    @classmethod
    def changed(cls, recording: dict[str, Any]) -> dict[str, Any]:
        for config in recording["pg_config"].values():
            cls.change(config)
        return recording
