"""``attemper.regularize``: penalties on the attention of a model that exists, with their exact gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attemper.call.result import AttentionStats
from attemper.checks import one_of
from attemper.control.entropy_meter import nats_in
from attemper.control.handle import Handle, IdleSites
from attemper.control.penalty_gradient import AttachPenalty, Ledger, Round, SiteEntry, tie
from attemper.errors import InputError
from attemper.monitor.hooks import Hook
from attemper.sites.actions import listen, unlisten
from attemper.sites.find import Site, chosen_sites
from attemper.sites.names import unwrap
from attemper.sites.observation import AttentionCall
from attemper.sites.padding import parameter_names

Alpha = float | Callable[[int, int], float]
"""A number, or a schedule ``(step, total_steps) -> number``, such as those of ``attemper.schedules``."""


class Penalty(ABC):
    """A term of a loss: the mean over sites of :meth:`value`, times ``coef``."""

    stats: tuple[str, ...] = ("entropy",)

    def __init__(self, coef: float = 0.01) -> None:
        if isinstance(coef, bool) or not isinstance(coef, (int, float)) or not math.isfinite(coef):
            raise InputError(f"{type(self).__name__}(coef=...) must be a finite number, got {coef!r}.")
        self.coef = float(coef)

    @abstractmethod
    def rows(self, stats: AttentionStats, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(statistic, what each row adds, its derivative by the statistic, which rows count), each [B, H, Q]."""

    def value(self, sums: Tensor, counts: Tensor) -> Tensor:
        """The penalty of a site, from what its rows add per head [H] and how many rows count."""
        return sums.sum() / counts.sum().clamp(min=1)

    def weights(self, sums: Tensor, counts: Tensor) -> Tensor:
        """[H]: the derivative of the site's penalty by what a row of each head adds."""
        return (1 / counts.sum().clamp(min=1)).expand(counts.shape)

    def goal(self, step: int) -> float:
        """The target of the rows in this step; 0 for a penalty without one."""
        del step
        return 0.0


class EntropyTarget(Penalty):
    r"""Penalty that pulls entropies to a target.

    .. math:: coef \cdot \operatorname{mean} \max(|H - \alpha| - tolerance, 0)^2

    Args:
        alpha: the target in nats, or a schedule ``(step, total_steps) -> nats``.
        coef: what a square nat is worth.
        tolerance: nats around the target that cost nothing.
        unit: "nats"; or "normalized" for H / log n with n the keys that a row sees, alpha from 0 to 1: for causal
            models, whose early rows cannot reach a target in nats. Rows that see one key do not count then.
        total_steps: of the training, for a schedule; ``penalty.step()`` goes on by one.

    Raises:
        InputError: a number is not finite, alpha or the tolerance is negative, or a schedule comes without its total.
    """

    def __init__(
        self,
        alpha: Alpha,
        coef: float = 0.01,
        *,
        tolerance: float = 0.0,
        unit: str = "nats",
        total_steps: int | None = None,
    ) -> None:
        super().__init__(coef)
        one_of("EntropyTarget(unit=...)", unit, ("nats", "normalized"))
        if not tolerance >= 0:
            raise InputError(f"EntropyTarget(tolerance=...) must be at least 0, got {tolerance!r}.")
        if callable(alpha) and (not isinstance(total_steps, int) or total_steps < 1):
            raise InputError("EntropyTarget(alpha=schedule) needs total_steps=, the optimizer steps of the training.")
        self.alpha, self.tolerance, self.unit, self.total_steps = alpha, float(tolerance), unit, total_steps
        self.stats = ("entropy",) if unit == "nats" else ("entropy", "visible_keys")
        self.goal(0)

    def goal(self, step: int) -> float:
        alpha = self.alpha(step, self.total_steps or 1) if callable(self.alpha) else self.alpha
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha < math.inf:
            raise InputError(f"EntropyTarget(alpha=...) must be at least 0 and finite, got {alpha!r} at step {step}.")
        return float(alpha)

    def rows(self, stats: AttentionStats, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        entropy = stats["entropy"]
        per, valid = nats_in(self.unit, stats, entropy.dtype)
        away = entropy.detach() * per - goal.to(entropy.dtype)
        excess = (away.abs() - self.tolerance).clamp(min=0)
        return entropy, excess.square(), 2 * excess * away.sign() * per, valid


class EntropyBonus(Penalty):
    """Penalty that rewards entropy, ``-coef * mean H``. It prevents collapse; a negative ``coef`` sharpens."""

    def rows(self, stats: AttentionStats, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        entropy = stats["entropy"]
        return entropy, -entropy.detach(), -torch.ones_like(entropy), stats.valid


class EntropyDiversity(Penalty):
    r"""Penalty that makes a layer's heads differ: ``-coef`` times the variance of their mean entropies.

    .. math:: -coef \cdot \frac{1}{H} \sum_h (\bar H_h - \bar H)^2
    """

    def rows(self, stats: AttentionStats, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        entropy = stats["entropy"]
        return entropy, entropy.detach(), torch.ones_like(entropy), stats.valid

    def value(self, sums: Tensor, counts: Tensor) -> Tensor:
        away, heads = self._away(sums, counts)
        return -away.square().sum() / heads

    def weights(self, sums: Tensor, counts: Tensor) -> Tensor:
        away, heads = self._away(sums, counts)
        return -2 * away / heads / counts.clamp(min=1)

    def _away(self, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Each head's mean from the mean of all; 0 for a head without rows."""
        has = counts > 0
        heads = has.sum().clamp(min=1)
        means = torch.where(has, sums / counts.clamp(min=1), 0.0)
        return torch.where(has, means - means.sum() / heads, 0.0), heads


class ZLoss(Penalty):
    """Penalty that keeps logits from drifting: ``coef * mean lse^2``. lse is the log of the sum of exponentials of a
    row's scores."""

    stats = ("lse",)

    def __init__(self, coef: float = 1e-4) -> None:
        super().__init__(coef)

    def rows(self, stats: AttentionStats, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lse, valid = stats["lse"], stats.valid
        shown = torch.where(valid, lse.detach(), 0.0)
        return lse, shown.square(), 2 * shown, valid


def regularize(
    model: nn.Module, penalty: Penalty, *, sites: Iterable[str] | None = None, observe: str = "replace"
) -> Regularizer:
    r"""Adds a penalty on attention sharpness to a model's training loss. The model's code stays as it is.

    .. math:: L + coef \cdot \operatorname{mean}_{sites} \operatorname{mean}_{heads, rows} \varphi(H)

    ::

        penalty = attemper.regularize(model, attemper.EntropyTarget(0.6, coef=0.1, unit="normalized"))
        for batch in loader:
            loss = penalty.attach(loss_of(model, batch))    # adds the penalty's value, and its gradient
            loss.backward()
            optimizer.step()

    The gradient is put in where each attention output flows back, so that both kinds of activation checkpointing,
    gradient accumulation, gradient scalers, autocast, DDP and torch.compile (of the model, called before) leave it
    exact. With ``Trainer``: ``Trainer(..., compute_loss_func=penalty.compute_loss)``.

    Args:
        model: as for :func:`attemper.temper`. Only modules in training mode count.
        penalty: :class:`~attemper.EntropyTarget`, ``EntropyBonus``, ``EntropyDiversity`` or ``ZLoss``.
        sites: names of modules whose attention to regularize, with all below them; None for all.
        observe: "replace" lets our kernel compute output and statistics in one pass, in place of the model's own, where
            it can (no attention dropout, no packed documents, not nn.MultiheadAttention); outputs move by rounding.
            "beside" keeps the model's own, and computes the statistics beside it.

    Returns:
        A handle with ``.attach(loss)``, ``.value``, ``.step()``, ``.reset()`` and ``.remove()``.

    Raises:
        InputError: nothing of the model attends in a way that is known, a name of ``sites`` matches nothing, or the
            model is compiled already.

    Note:
        Rows count that see a key, of padded sequences too unless the model is called with an ``attention_mask``
        [B, N] of ints or bools (and, of an encoder-decoder, a ``decoder_attention_mask``). What runs in place of an
        eager attention returns no weights. Under DDP every process takes the mean over its own rows.
    """
    if not isinstance(penalty, Penalty):
        raise InputError(
            "regularize(penalty) must be attemper.EntropyTarget, EntropyBonus, EntropyDiversity or ZLoss, got "
            f"{type(penalty).__name__}."
        )
    one_of("regularize(observe=...)", observe, ("replace", "beside"))
    return Regularizer(model, penalty, chosen_sites("regularize", model, sites), observe == "replace")


class Regularizer(Handle):
    """A penalty on a model, made by :func:`regularize`."""

    def __init__(self, model: nn.Module, penalty: Penalty, sites: list[Site], replaces: bool) -> None:
        self.model, self.penalty = model, penalty
        self.replaces, self.stats = replaces, penalty.stats
        self.steps = 0
        """Optimizer steps, for a schedule."""
        self._ledger = Ledger("regularize")
        self._entries = {site.module: SiteEntry(self._ledger, site.name) for site in sites}
        self._goal = torch.tensor(penalty.goal(0), dtype=torch.float64)
        self._value: Tensor | None = None
        self._tokens: dict[str, Tensor] = {}
        whole = unwrap(model)
        self._names = parameter_names(whole)
        self._two_sided = bool(getattr(getattr(whole, "config", None), "is_encoder_decoder", False))
        self._sites = sites
        self._idle = IdleSites("regularize", sites)
        for site in sites:
            listen(site, self)
        self._hook = model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True)

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the modules that are regularized, in the order of the model."""
        return tuple(site.name for site in self._sites)

    @property
    def value(self) -> float:
        """The penalty of the last attached loss, for logging: ``coef`` times the mean over sites.

        Raises:
            InputError: no loss was attached yet.
        """
        if self._value is None:
            raise InputError("penalty.value is there after the first penalty.attach(loss).")
        return float(self._value)

    def attach(self, loss: Tensor, *, share: float | Tensor = 1.0) -> Tensor:
        """``loss`` plus the penalty of all forward passes since the last attach.

        The gradient follows any factor that is put on the result (a scaler's, 1 / accumulation steps).

        Args:
            loss: a number with a gradient, made of those forward passes.
            share: what the penalty counts here: the part of an optimizer step that these passes are, where the loss is
                a sum over the parts that nothing divides any more.

        Raises:
            InputError: the loss is no number with a gradient,
                or no attention ran in training mode since the last attach.

        Warns:
            once, of sites that have not run in training mode so far.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            kind = type(loss).__name__
            came = f"{list(loss.shape)}, requires_grad={loss.requires_grad}" if isinstance(loss, Tensor) else kind
            raise InputError(f"penalty.attach(loss) needs a tensor of one number with a gradient, got {came}.")
        current, self._ledger.pending = self._ledger.pending, Round()
        if not current.sites:
            raise InputError(
                "penalty.attach(loss): no attention ran in training mode since the last attach. Call model.train(), "
                "and attach after the forward pass."
            )
        self._idle.note(current.sites)
        values = []
        for name, counted in current.sites.items():
            assert counted.sums is not None
            assert counted.counts is not None
            values.append(self.penalty.value(counted.sums, counted.counts))
            worth = self.penalty.coef / len(current.sites) * self.penalty.weights(counted.sums, counted.counts)
            current.weights[name] = worth * (share.to(worth.device) if isinstance(share, Tensor) else share)
        share = share.to(loss.device) if isinstance(share, Tensor) else share
        self._value = share * self.penalty.coef * torch.stack([value.to(loss.device) for value in values]).mean()
        return AttachPenalty.apply(loss, self._value, self._ledger, current)  # pyright: ignore

    def compute_loss(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        """``Trainer``'s ``compute_loss_func``: the model's own loss, attached.

        ``Trainer`` keeps the labels from the model and divides by the tokens of a whole optimizer step: the loss is
        then the model's ``loss_function``, and the penalty counts by this batch's share of those tokens. An evaluation,
        without gradients, has no penalty.

        Raises:
            InputError: the outputs hold no loss, and the model has no ``loss_function`` of transformers to make one.
        """
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is None:
            loss = _own_loss(unwrap(self.model), outputs, labels, num_items_in_batch)
        if not torch.is_grad_enabled():
            return loss
        share: Any = 1.0
        if num_items_in_batch is not None and isinstance(labels, Tensor):
            share = _targets(unwrap(self.model), labels) / num_items_in_batch
        return self.attach(loss, share=share)

    def step(self) -> None:
        """Advances a scheduled target by one optimizer step."""
        self._go_to(self.steps + 1)

    def reset(self) -> None:
        """Drops forward passes whose loss you do not use."""
        self._ledger.pending, self._ledger.running = Round(), None

    def state_dict(self) -> dict[str, Any]:
        """The step, for a checkpoint."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint.

        Raises:
            InputError: the state is not one of ``regularize``.
        """
        if set(state) != {"steps"}:
            raise InputError(f"regularize's load_state_dict(state) must have steps, got {sorted(state)}.")
        self._go_to(int(state["steps"]))

    def remove(self) -> None:
        """Removes the penalty from the model. You may call it again."""
        self._hook.remove()
        self._ledger.removed = True
        for site in self._sites:
            unlisten(site, self)
        self._entries.clear()

    def wants(self, module: nn.Module) -> bool:
        """Whether this call counts (a ``Listener``'s)."""
        return module.training

    def receive(self, module: nn.Module, call: AttentionCall, stats: AttentionStats | None, output: Tensor) -> Tensor:
        """Ties an attention output to its statistic (a ``Listener``'s)."""
        assert stats is not None
        statistic, values, gradient, valid = self.penalty.rows(stats, self._goal)
        tokens = self._real(self._entries[module].name, call)
        if tokens is not None:
            valid = valid & tokens[:, None]
        return tie(output, statistic, values, gradient, valid, self._entries[module].key)

    def _real(self, name: str, call: AttentionCall) -> Tensor | None:
        """Which queries of a call are real tokens [B, Q], where the model was called with a mask of them."""
        rows = (call.query.shape[0], call.query.shape[2])
        if self._two_sided and "decoder" in name.split("."):
            tokens = self._tokens.get("decoder_attention_mask")
            return tokens if tokens is not None and tokens.shape == rows else None
        tokens = self._tokens.get("attention_mask")
        own = rows == (call.query.shape[0], call.key.shape[2])
        return tokens if own and tokens is not None and tokens.shape == rows else None

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass of the model: which tokens are real."""
        self._tokens, arguments = {}, dict(zip(self._names, args, strict=False)) | kwargs
        for name in ("attention_mask", "decoder_attention_mask"):
            mask = arguments.get(name)
            if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.dtype.is_floating_point:
                self._tokens[name] = mask.bool()

    def _go_to(self, step: int) -> None:
        self.steps = step
        self._goal.fill_(self.penalty.goal(step))


def _targets(model: Any, labels: Tensor) -> Tensor:
    """How many of the labels the loss of a transformers model counts: a causal one leaves the first of a row out."""
    causal = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    shifted = causal and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return ((labels[..., 1:] if shifted else labels) != -100).sum()


def _own_loss(model: Any, outputs: Any, labels: Any, num_items_in_batch: Any) -> Tensor:
    """The loss of a transformers model, for labels that it was called without."""
    function, config = getattr(model, "loss_function", None), getattr(model, "config", None)
    if not callable(function) or labels is None or not isinstance(outputs, dict) or "logits" not in outputs:
        raise InputError(
            f"penalty.compute_loss found no loss in what {type(model).__name__} returned, and cannot compute one: "
            "write a function that returns penalty.attach(your_loss) and give Trainer that."
        )
    size = getattr(config, "vocab_size", None)
    more = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
    return function(logits=outputs["logits"], labels=labels, vocab_size=size, **more)  # pyright: ignore
