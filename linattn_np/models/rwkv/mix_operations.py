"""The protocol of the operations that the mixes of every RWKV version call, in the modules `mixes` of the versions."""

from typing import Protocol


class CommonOperations(Protocol):
    """`layer` has the arrays of the version's `weights.LAYER` as attributes; an operation that serves several weights
    gets their names.

    The residual x and all that is computed from it are [..., D] with axes of tokens, or [n, ..., D] for a stack of n.
    `shift` (the previous token's normed x) and `wkv` (the recurrence's state) are the layer's part of the state; the
    operations that get them read and update them. Operations for gradients get None for both.
    """

    def shift_mix(self, layer, norm: str, maa: str, x, shift):
        """``(xx + d maa [n, ..., D], xx, d)`` with xx = LN(x) and d = xx_{t-1} - xx_t. norm, maa: the names of the
        norm's (weight, bias) and of the n mixes' weights [n, D]."""

    def product(self, layer, name: str, x):
        """x W^T, W being the matrix `name`; of a stack of n matrices and a stack of n x, n products."""

    def squared_product(self, layer, name: str, x):
        """relu(x W^T)^2; or another activation in place of the square, if the model has one."""

    def add_product(self, layer, name: str, x, y):
        """x + y W^T; x may be written to."""
