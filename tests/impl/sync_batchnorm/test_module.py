"""The layer as a module: construction, messages, eval, state, conversion. One process, no group."""

from __future__ import annotations

import inspect
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from impl.sync_batchnorm import SyncBatchNorm
from impl.sync_batchnorm.normalise import Exchange

torchs_layers_take_bias = pytest.mark.skipif(
    "bias" not in inspect.signature(nn.BatchNorm1d).parameters, reason="torch 2.11's do not"
)


class NobodyThere:
    """An exchange that fails the test if it is used."""

    def all_gather(self, message: Tensor) -> NoReturn:
        pytest.fail("all_gather without need")

    def all_reduce(self, vector: Tensor) -> NoReturn:
        pytest.fail("all_reduce without need")


class Grouped(SyncBatchNorm):
    """In a group, whose collectives must not be used."""

    def _exchange(self) -> Exchange:
        return NobodyThere()


@torchs_layers_take_bias
def test_the_signature_is_torchs() -> None:
    ours, theirs = (
        inspect.signature(layer.__init__).parameters for layer in (SyncBatchNorm, nn.SyncBatchNorm)
    )
    assert list(ours) == list(theirs)
    for name in ours:
        assert (ours[name].default, ours[name].kind) == (theirs[name].default, theirs[name].kind)
    ours = inspect.signature(SyncBatchNorm.convert_sync_batchnorm).parameters
    theirs = inspect.signature(nn.SyncBatchNorm.convert_sync_batchnorm).parameters
    assert list(ours) == list(theirs)


@torchs_layers_take_bias
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_parameters_and_state_are_torchs(affine: bool, bias: bool, track: bool) -> None:
    ours = SyncBatchNorm(
        3, affine=affine, track_running_stats=track, dtype=torch.float64, bias=bias
    )
    theirs = nn.SyncBatchNorm(
        3, affine=affine, track_running_stats=track, dtype=torch.float64, bias=bias
    )
    assert repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
        assert ours.state_dict()[name].dtype == value.dtype


@pytest.mark.parametrize("layer", [SyncBatchNorm(3), Grouped(3)])
def test_integers_are_refused(layer: SyncBatchNorm) -> None:
    with pytest.raises(NotImplementedError, match='"batch_norm" not implemented for'):
        layer(torch.ones(2, 3, dtype=torch.long))


@pytest.mark.parametrize(
    ("given", "held", "words"),
    [
        (torch.float32, torch.float64, "expect parameter to have scalar type of Float"),
        (torch.float64, torch.float32, "all inputs must share same datatype"),
        (torch.bfloat16, torch.float64, "expect parameter to have scalar type of Float"),
    ],
)
@pytest.mark.parametrize("track", [True, False], ids=["tracked", "untracked"])
def test_a_dtype_that_plain_batch_norm_refuses(
    given: torch.dtype, held: torch.dtype, words: str, track: bool
) -> None:
    x = torch.ones(4, 3, dtype=given)
    with pytest.raises(RuntimeError, match=words):
        nn.BatchNorm1d(3, track_running_stats=track, dtype=held)(x)
    name = "running_mean" if track else "weight"
    with pytest.raises(RuntimeError, match=rf"{words}. The input is {given}, {name} is {held}"):
        Grouped(3, track_running_stats=track, dtype=held)(x)


@pytest.mark.parametrize("given", [torch.float32, torch.float16])
def test_parameters_of_another_half_type(given: torch.dtype) -> None:
    layer = Grouped(3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=f"input is {given}, weight is torch.bfloat16"):
        layer(torch.ones(4, 3, dtype=given))


class TestWithoutAGroup:
    """Plain batch norm."""

    @pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 2, 2), (2, 3, 2, 2, 2)])
    def test_training(self, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape)
        plain = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
        ours, theirs = SyncBatchNorm(3), plain[len(shape)](3)
        assert torch.equal(ours(x), theirs(x))
        assert torch.equal(ours.running_var, theirs.running_var)  # type: ignore[arg-type]  # tracked

    def test_momentum_none(self) -> None:
        ours, theirs = SyncBatchNorm(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
        for _ in range(3):
            x = torch.randn(4, 3)
            ours(x)
            theirs(x)
        assert torch.equal(ours.running_mean, theirs.running_mean)  # type: ignore[arg-type]  # tracked


class TestEvalCommunicatesNothing:
    def test_frozen(self) -> None:
        layer = Grouped(3).eval()
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        x = torch.randn(4, 3, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None
        assert all(parameter.grad is None for parameter in layer.parameters())


class TestConversion:
    def test_every_kind_of_batch_norm_and_nothing_else(self) -> None:
        group = object()
        model = nn.Sequential(
            nn.Conv2d(3, 4, 1),
            nn.BatchNorm2d(4, eps=1e-3, momentum=None),
            nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.BatchNorm3d(4)),
            nn.SyncBatchNorm(4, track_running_stats=False),
            nn.GroupNorm(2, 4),
        )
        names = list(model.state_dict())
        converted = SyncBatchNorm.convert_sync_batchnorm(model, group)
        assert converted is model
        kinds = [type(layer).__name__ for layer in model.modules()]
        assert kinds == [
            *("Sequential", "Conv2d", "SyncBatchNorm", "Sequential"),
            *("SyncBatchNorm", "SyncBatchNorm", "SyncBatchNorm", "GroupNorm"),
        ]
        layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
        assert len(layers) == 4
        assert all(layer.process_group is group for layer in layers)
        assert (layers[0].eps, layers[0].momentum) == (1e-3, None)
        assert [name for name, _ in layers[1].named_parameters()] == []
        assert layers[3].running_mean is None
        assert list(model.state_dict()) == names

    @torchs_layers_take_bias
    def test_parameters_and_buffers_are_taken_over(self) -> None:
        plain = nn.BatchNorm2d(3, dtype=torch.float64, bias=False).eval()
        plain.qconfig = "kept"  # type: ignore[assignment]  # torch.ao sets it so
        layer = SyncBatchNorm.convert_sync_batchnorm(plain)
        assert isinstance(layer, SyncBatchNorm)
        assert layer.weight is plain.weight
        assert [name for name, _ in layer.named_parameters()] == ["weight"]
        assert layer.running_mean is plain.running_mean
        assert layer.num_batches_tracked is plain.num_batches_tracked
        assert not layer.training
        assert layer.qconfig == "kept"

    def test_children_of_a_layer_come_along(self) -> None:
        class WithChild(nn.BatchNorm1d):
            def __init__(self) -> None:
                super().__init__(3)
                self.inner = nn.Sequential(nn.BatchNorm1d(2))

        with pytest.warns(UserWarning, match="the module, which is a WithChild"):
            layer = SyncBatchNorm.convert_sync_batchnorm(WithChild())
        assert isinstance(layer, SyncBatchNorm)
        assert isinstance(layer.inner, nn.Sequential)
        assert isinstance(layer.inner[0], SyncBatchNorm)

    def test_a_class_of_ones_own_is_warned_of_by_name(self) -> None:
        class WithActivation(nn.BatchNorm1d):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input).relu()

        model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(WithActivation(2)))
        with pytest.warns(UserWarning, match=r"1\.0, which is a WithActivation") as caught:
            SyncBatchNorm.convert_sync_batchnorm(model)
        assert [warning.filename for warning in caught] == [__file__]

    def test_a_subclass_makes_layers_of_its_own(self) -> None:
        class Own(SyncBatchNorm):
            pass

        model = nn.Sequential(nn.BatchNorm1d(2), SyncBatchNorm(2))
        Own.convert_sync_batchnorm(model)
        assert [type(layer) for layer in model] == [Own, Own]
