"""Mutants of conformance/spec/ddp/verification.py."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.nn.parameter import UninitializedParameter

from conformance.verdict import Verdict
from impl.ddp.wrapper import api, verification
from impl.ddp.wrapper.module_sync import broadcast_coalesced
from tests.mutants.ddp.kit import DDPMutant, beforehand, constructor, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/verify/number-of-parameters", says="does not match|was to raise")
@breaks("ddp/verify/shapes", says="does not match|was to raise|went on")
@breaks("ddp/verify/strides", says="does not match|was to raise|went on")
@breaks("ddp/verify/order-of-registration", says="does not match|was to raise|went on")
class ComparesNoParameters(DDPMutant):
    patched = instead(api, "verify_params_across_processes", lambda *args, **kwargs: None)


def _about_the_first(right: Any) -> Any:
    def compare(self: Any, *descriptions: str, other: int) -> Any:
        return str(right(self, *descriptions, other=other)).replace("params[1]", "params[0]")

    return compare


@breaks("ddp/verify/names-the-parameter", says="does not match")
class NamesTheFirstParameter(DDPMutant):
    """Whichever parameter differs, the message is about the first one."""

    patched = swap(verification._Digests, "_compare", _about_the_first)


@breaks("ddp/verify/ignored-sets", says="does not match|was to raise")
class ComparesNoIgnoredSets(DDPMutant):
    @staticmethod
    def patched() -> Any:
        stack = contextlib.ExitStack()
        stack.enter_context(instead(verification, "_check_counts", lambda *args: None)())
        stack.enter_context(instead(verification._Digests, "difference", lambda self: None)())
        return stack


@breaks("ddp/verify/nothing-to-train", says="was to raise|does not match")
class WrapsAnything(DDPMutant):
    patched = instead(
        api, "_parameters_to_manage", lambda module, *_, **__: list(module.parameters())
    )


def _without_words(right: Any) -> Any:
    def choose(*args: Any) -> Any:
        try:
            return right(*args)
        except ValueError:
            raise RuntimeError("no group") from None

    return choose


@breaks("ddp/verify/without-a-group", says="raised RuntimeError: no group")
class RaisesAnotherErrorWithoutAGroup(DDPMutant):
    patched = swap(api, "choose_group", _without_words)


@breaks("ddp/verify/device-ids-of-a-cpu-module", says="rank 0 was to raise ValueError")
class DropsDeviceIds(DDPMutant):
    patched = swap(
        api, "choose_devices", lambda right: lambda params, *_: right(params, None, None)
    )


def _in_pairs(right: Any) -> Any:
    names = ("delay_all_reduce_named_params", "param_to_hook_all_reduce")

    def init(self: Any, module: Any, **options: Any) -> None:
        if sum(name in options for name in names) == 1:
            options = {name: value for name, value in options.items() if name not in names}
        right(self, module, **options)

    return init


@breaks("ddp/verify/delayed-arguments", says="rank 0 was to raise ValueError")
class DropsHalvesOfAPair(DDPMutant):
    patched = constructor(_in_pairs)


@breaks("ddp/verify/lazy-parameters", says="rank 0 .*is not needed when.*does not match")
class SkipsParametersWithoutAShape(DDPMutant):
    @staticmethod
    def _shaped(right: Any) -> Any:
        def manage(module: Any, ignored: Any, **how: Any) -> Any:
            lazy = {
                name
                for name, param in module.named_parameters()
                if isinstance(param, UninitializedParameter)
            }
            return right(module, ignored | lazy, **how)

        return manage

    patched = swap(api, "_parameters_to_manage", _shaped)


@breaks("ddp/verify/shapes-on-every-rank", says="rank 0 went on", verdict=Verdict.TIMEOUT)
class OnlyDifferingRanksRaise(DDPMutant):
    """Only a rank whose model is not rank 0's raises."""

    patched = instead(verification._Digests, "difference", lambda self: None)


def _synchronise(group: Any, params: Any, *_: Any, **__: Any) -> None:
    broadcast_coalesced(group, [param.detach() for param in params], 2**20, 0)


@breaks("ddp/verify/shapes", says="does not match.*sizes")
class SynchronisesBeforeItCompares(DDPMutant):
    """Parameters of other sizes are a broadcast of another length before they are compared."""

    patched = beforehand(api, "verify_params_across_processes", _synchronise)


def _narrow(_: Any, params: Any, **__: Any) -> None:
    for param in params:
        param.data = param.data.float()


@breaks("ddp/verify/dtypes", says="rank 0 was to raise RuntimeError")
class ConvertsWhatDiffers(DDPMutant):
    """Parameters of different precision are all made float32."""

    patched = beforehand(api, "verify_params_across_processes", _narrow)
