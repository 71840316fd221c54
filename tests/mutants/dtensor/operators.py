"""Mutants of conformance/spec/dtensor/operators.py: in all, some ranks have other numbers."""

from __future__ import annotations

from tests.mutants.dtensor.kit import OperatorMutant
from tests.mutants.kit import breaks


@breaks("dtensor/operators/pointwise", says="too far off|want True|want False")
class LiftsSomeShards(OperatorMutant):
    ops = ("relu",)


@breaks("dtensor/operators/numbers", says="too far off|want True|want False")
class DividesOtherwiseByNumbers(OperatorMutant):
    ops = ("remainder.Scalar",)


@breaks("dtensor/operators/two-operands", says="too far off|want True|want False")
class TurnsOtherwise(OperatorMutant):
    ops = ("atan2",)


@breaks("dtensor/operators/three-operands", says="too far off|want True|want False")
class AddsOneMore(OperatorMutant):
    ops = ("addcmul",)


@breaks("dtensor/operators/broadcast", says="too far off|want True|want False")
@breaks("dtensor/gradients/broadcast", says="too far off")
@breaks("dtensor/gradients/two-operands", says="too far off")
class ProductsOfOtherNumbers(OperatorMutant):
    ops = ("mul.Tensor",)


@breaks("dtensor/operators/sums", says="too far off|want True|want False")
class CountsOneMore(OperatorMutant):
    ops = ("sum.dim_IntList",)


@breaks("dtensor/operators/extremes", says="too far off|want True|want False")
class CountsFromOne(OperatorMutant):
    ops = ("argmax",)


@breaks("dtensor/operators/norms", says="too far off|want True|want False")
class VariesMore(OperatorMutant):
    ops = ("var.correction",)


@breaks("dtensor/operators/running", says="too far off|want True|want False")
class BeginsAtOne(OperatorMutant):
    ops = ("cumsum",)


@breaks("dtensor/operators/softmax", says="too far off|want True|want False")
class SumsItsOwnExponentials(OperatorMutant):
    ops = ("_softmax",)


@breaks("dtensor/operators/products", says="too far off|want True|want False")
@breaks("dtensor/gradients/products", says="too far off")
class MultipliesOtherRows(OperatorMutant):
    ops = ("mm",)


@breaks("dtensor/operators/views", says="too far off|want True|want False")
@breaks("dtensor/gradients/views", says="too far off")
class ViewsOtherNumbers(OperatorMutant):
    ops = ("view",)


@breaks("dtensor/operators/pieces", says="too far off|want True|want False")
class CutsOtherSlices(OperatorMutant):
    ops = ("slice.Tensor",)


@breaks("dtensor/operators/indexing", says="too far off|want True|want False")
class SelectsOtherRows(OperatorMutant):
    ops = ("index_select",)


@breaks("dtensor/operators/joined", says="too far off|want True|want False")
class JoinsOtherNumbers(OperatorMutant):
    ops = ("cat",)


@breaks("dtensor/operators/turned", says="too far off|want True|want False")
@breaks("dtensor/gradients/turned", says="too far off")
class FlipsOtherNumbers(OperatorMutant):
    ops = ("flip",)


@breaks("dtensor/operators/sorted", says="too far off|want True|want False")
class SortsOtherNumbers(OperatorMutant):
    ops = ("sort",)


@breaks("dtensor/operators/losses", says="too far off|want True|want False")
class LosesMore(OperatorMutant):
    ops = ("mse_loss",)


@breaks("dtensor/operators/normalized", says="too far off|want True|want False")
class NormsOtherwise(OperatorMutant):
    ops = ("native_layer_norm",)


@breaks("dtensor/operators/convolutions", says="too far off|want True|want False")
class ConvolvesOtherwise(OperatorMutant):
    ops = ("convolution",)


@breaks("dtensor/operators/alike", says="too far off|want True|want False")
class MakesTwos(OperatorMutant):
    ops = ("ones_like",)


@breaks("dtensor/operators/dtypes", says="too far off|want True|want False")
class TakesOtherBits(OperatorMutant):
    ops = ("bitwise_xor.Tensor",)


@breaks("dtensor/operators/empty-shards", says="too far off|want True|want False")
class AddsTheEmpty(OperatorMutant):
    ops = ("sum.dim_IntList", "cat")


@breaks("dtensor/gradients/pointwise", says="too far off")
class SlopesOfTanh(OperatorMutant):
    ops = ("tanh_backward",)


@breaks("dtensor/gradients/softmax", says="too far off")
class SlopesOfSoftmax(OperatorMutant):
    ops = ("_softmax_backward_data",)


@breaks("dtensor/gradients/normalized", says="too far off")
class SlopesOfNorms(OperatorMutant):
    ops = ("native_layer_norm_backward",)


@breaks("dtensor/gradients/losses", says="too far off")
class SlopesOfLosses(OperatorMutant):
    ops = ("mse_loss_backward",)


@breaks("dtensor/gradients/indexing", says="too far off")
class SlopesOfEmbeddings(OperatorMutant):
    ops = ("embedding_dense_backward",)


@breaks("dtensor/gradients/sums", says="too far off")
@breaks("dtensor/gradients/joined", says="too far off")
class ExpandsAndCutsOtherNumbers(OperatorMutant):
    ops = ("expand", "slice.Tensor")


@breaks("dtensor/in-place/operators", says="too far off")
@breaks("dtensor/in-place/views", says="too far off")
class WritesOtherNumbers(OperatorMutant):
    ops = ("add_.Tensor", "mul_.Tensor")


@breaks("dtensor/operators/running-from-the-end", says=r"cumsum\(-1\) of S1: ")
@breaks("dtensor/operators/mean-losses", says="mse_loss, mean of S0, S0: ")
@breaks("dtensor/operators/cut-convolutions", says="conv1d of S1, S1, R: ")
@breaks("dtensor/gradients/largest", says="norm of S0: ")
@breaks("dtensor/in-place/sums", says="fill_ of P: ")
@breaks("dtensor/in-place/pieces", says=r"x\[0\] of S0: ")
class HasTorchsFaults(OperatorMutant):
    ops = ()
