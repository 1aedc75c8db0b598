"""Weights with a learned spectral norm: sigma-reparametrisation, which bounds how sharp attention can become."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attemper.checks import one_of, positive_number
from attemper.control.handle import Handle
from attemper.control.query_key_weights import WHICH, LinearWeight, linear_weights, owners_of
from attemper.errors import InputError
from attemper.sites.names import check_matches, check_sites, class_name, names_of, unwrap
from attemper.sites.sharded import is_dtensor

_FIRST_STEPS = 100
"""Of power iteration at most, before training."""
_CONVERGED = 1e-6
"""Relative change of the spectral norm in a step."""


class SpectralScale(nn.Module):
    r"""The parametrization: each block of output features is divided by its spectral norm and multiplied by its gain.

    .. math:: \hat W_b = \gamma_b \frac{W_b}{\sigma(W_b)}, \quad \sigma(W_b) = u_b^\top W_b v_b

    Attributes:
        gamma: [blocks], learned.
        u: [out features, blocks], the left singular vector of each block, 0 at the features of others.
        v: [blocks, in features], the right ones. Both move by one step of power iteration whenever the weight has
            changed, in training; they are constants to the gradient.
    """

    gamma: nn.Parameter
    u: Tensor
    v: Tensor
    block_of: Tensor
    """[out features]: the block of each, or the number of blocks where it is in none."""

    def __init__(self, given: LinearWeight, gamma: float | None) -> None:
        super().__init__()
        self.dim = given.dim
        self._seen: int | None = None  # torch asks for the weight while it registers this: no step of training
        matrix = self._matrix(given.tensor.detach())
        self.register_buffer("block_of", given.block_of.to(matrix.device), persistent=False)
        self.blocks = given.blocks
        # A fixed start, so that the same model gives the same numbers, with no pattern that weights could share.
        start = torch.arange(1, len(matrix) + 1, device=matrix.device).to(matrix.dtype).square().sin()
        self.register_buffer("u", _columns_of_length_1(start[:, None] * self._members()))
        self.register_buffer("v", matrix.new_zeros(self.blocks, matrix.shape[1]))
        sigma = self._converge(matrix)
        if not bool((torch.isfinite(sigma) & (sigma > 0)).all()):
            raise InputError(
                f"sigma_reparam_: {given.name} has a spectral norm of {sigma.tolist()}; it must be finite and above 0 "
                "to divide by. Leave such a layer out: name the modules to change with sites=."
            )
        self.gamma = nn.Parameter(sigma.clone() if gamma is None else torch.full_like(sigma, gamma))

    def place(self, module: nn.Module, parameter: str) -> None:
        """Stands before ``module.parameter`` from now on."""
        parametrize.register_parametrization(module, parameter, self)
        self._seen = module.parametrizations[parameter].original._version  # type: ignore[index]

    def forward(self, weight: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():  # in compiled code the model's hook has done it, outside any checkpoint
            self.follow(weight)
        with torch.autocast(weight.device.type, enabled=False):
            ratio = self.gamma.to(_wide(weight)) / self._sigma(self._matrix(weight))
            scale = torch.cat((ratio, ratio.new_ones(1)))[self.block_of].to(weight.dtype)
            return weight * (scale[:, None] if self.dim == 0 else scale)

    def follow(self, weight: Tensor) -> None:
        """One step of power iteration if the weight has changed since the last, in training.

        Nothing happens between a forward pass and its second run under activation checkpointing: the weight is the
        same. Compiled code cannot ask for the version, and takes a step at every forward pass of the model.
        """
        if not self.training or self._seen is None:
            return
        if not torch.compiler.is_compiling():
            if weight._version == self._seen:
                return
            self._seen = weight._version
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            self._step(self._matrix(weight.detach()))

    def _members(self) -> Tensor:
        """[out features, blocks] bool."""
        return self.block_of[:, None] == torch.arange(self.blocks, device=self.block_of.device)

    def _matrix(self, weight: Tensor) -> Tensor:
        """[out features, in features], in float32 or float64."""
        return (weight if self.dim == 0 else weight.t()).to(_wide(weight))

    def _sigma(self, matrix: Tensor) -> Tensor:
        # Copies: the next step overwrites the buffers, and a backward pass may come after it.
        u, v = self.u.to(matrix.dtype, copy=True), self.v.to(matrix.dtype, copy=True)
        return ((matrix @ v.t()) * u).sum(0)

    def _step(self, matrix: Tensor) -> None:
        right = _columns_of_length_1(matrix.t() @ self.u.to(matrix.dtype))
        self.v.copy_(right.t())
        self.u.copy_(_columns_of_length_1((matrix @ right) * self._members()))

    def _converge(self, matrix: Tensor) -> Tensor:
        """[blocks] spectral norms, from below."""
        before = matrix.new_zeros(len(self.v))
        for _ in range(_FIRST_STEPS):
            self._step(matrix)
            sigma = self._sigma(matrix)
            if bool(((sigma - before).abs() <= _CONVERGED * sigma).all()):
                break
            before = sigma
        return self._sigma(matrix)


class SigmaReparam(Handle):
    """Handle of :func:`sigma_reparam_`, which can undo its changes.

    Attributes:
        names: of the weights, as in the model.
    """

    def __init__(self, model: nn.Module, weights: list[LinearWeight], scales: list[SpectralScale]) -> None:
        self.names = tuple(weight.name for weight in weights)
        self._places = [(weight.module, weight.parameter) for weight in weights]
        self._scales = scales
        for (module, parameter), scale in zip(self._places, scales, strict=True):
            scale.place(module, parameter)
        self._hook = model.register_forward_pre_hook(self._follow)

    def remove(self) -> None:
        """Leaves the weights as they are in effect, plain parameters again. A second call does nothing.

        Optimizers hold the parameters from before: make a new one to train on.
        """
        self._hook.remove()
        for (module, parameter), scale in zip(self._places, self._scales, strict=True):
            scale.eval()  # what is asked for here is no step of training
            parametrize.remove_parametrizations(module, parameter, leave_parametrized=True)
        self._places, self._scales = [], []

    def _follow(self, model: nn.Module, inputs: object) -> None:
        for (module, parameter), scale in zip(self._places, self._scales, strict=True):
            scale.follow(module.parametrizations[parameter].original)  # type: ignore[index]


def sigma_reparam_(
    model: nn.Module, *, which: str = "all", sites: Iterable[str] | None = None, gamma: float | None = None
) -> SigmaReparam:
    r"""Gives linear layers a learned spectral norm, which bounds attention logits.

    .. math:: \hat W = \gamma \frac{W}{\sigma(W)}

    :math:`\sigma(W)`, the largest singular value, follows W by one step of power iteration for each change of W, with
    its gradient; :math:`\gamma` is learned. W can then grow without making queries and keys longer. The queries, keys
    and values of a packed projection have a norm each. ::

        handle = attemper.sigma_reparam_(model)
        optimizer = torch.optim.AdamW(model.parameters())  # after it: gamma is a parameter, too
        ...
        handle.remove()  # plain weights again, the same outputs

    Call it before torch.compile and before wrapping for data-parallel training. In ``state_dict`` a weight is
    ``parametrizations.weight.original`` with ``gamma``, ``u`` and ``v`` beside it; apply it before loading such a
    checkpoint. A weight changed through ``.data`` is not noticed: ``torch.optim`` changes it in a way that is.

    Args:
        model: changed in place. Modules of ``nn.Linear`` and transformers' ``Conv1D``, and the packed weights of
            ``nn.MultiheadAttention``; experts that are one tensor of three dimensions are left alone.
        which: "all" linear layers, as in the paper; those of "attention";
            or "qk", the projections of queries and keys.
        sites: names of modules; only what lies in them is changed. None for the whole model.
        gamma: where to start; the paper has 1. None starts each at its own :math:`\sigma(W)`, so that the weights,
            and what the model computes, stay as they are.

    Returns:
        A handle with ``.remove()``, which is a context manager, too.

    Raises:
        InputError: nothing to change, or nothing in one of ``sites``; a weight that is tied to another place (an output
            layer to its embedding: choose ``which="attention"``), parametrised already, split over processes, not
            floating, or zero; a model that is compiled or wrapped already; or, for "attention" and "qk", an attention
            whose layout is not known. Nothing was changed then.

    Source:
        Zhai et al. 2023, "Stabilizing Transformer Training by Preventing Attention Entropy Collapse"
        (arXiv 2303.06296).
    """
    one_of("sigma_reparam_(which=...)", which, WHICH)
    if gamma is not None:
        gamma = positive_number("sigma_reparam_(gamma=...)", gamma, "The paper starts at 1.")
    if unwrap(model) is not model:
        raise InputError(
            f"sigma_reparam_(model) is a {class_name(model)} around the model: apply it to the model first, then "
            "compile or wrap."
        )
    wanted = check_sites("sigma_reparam_", sites)
    check_matches("sigma_reparam_", wanted, filter(None, names_of(model).values()), "module")
    weights = linear_weights(model, which, wanted)
    check_matches("sigma_reparam_", wanted, (weight.name for weight in weights), "linear weight of this kind")
    _refuse(model, weights)
    return SigmaReparam(model, weights, [SpectralScale(weight, gamma) for weight in weights])


def _refuse(model: nn.Module, weights: list[LinearWeight]) -> None:
    places = owners_of(model)
    for weight in weights:
        reason = _why_not(weight, places)
        if reason:
            raise InputError(f"sigma_reparam_: {weight.name} {reason}")


def _why_not(weight: LinearWeight, places: dict[int, list[str]]) -> str | None:
    if parametrize.is_parametrized(weight.module, weight.parameter):
        return "is parametrised already. Remove that first (.remove() of the handle, if it was this function)."
    tensor = weight.tensor
    if not isinstance(tensor, nn.Parameter):
        return f"is not a parameter but {type(tensor).__name__}. Name the modules to change with sites=."
    if is_dtensor(tensor):
        return "is split over processes (DTensor), which is not supported. Apply this before sharding."
    if tensor.is_meta or not tensor.is_floating_point():
        return f"must be floating and have values, got {tensor.dtype} on {tensor.device}."
    shared = places[id(tensor)]
    if len(set(shared)) > 1:
        return (
            f"is tied: the same parameter is {' and '.join(sorted(set(shared)))}. Its other place would change, too. "
            "Choose which='attention', or name the modules to change with sites=."
        )
    return None


def _columns_of_length_1(matrix: Tensor) -> Tensor:
    return matrix / torch.linalg.vector_norm(matrix, dim=0, keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)


def _wide(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
