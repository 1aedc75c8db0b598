# ruff: noqa: E501 (the table quotes lines of source)
"""Mutants of the blocked kernels, and the tests that notice each."""

from __future__ import annotations

from tests.mutants.runner import Mutant

FORWARD, BACKWARD, GRADIENTS, SCORES, PROBLEM = (
    f"backends/blocked/{name}.py" for name in ("softmax_forward", "softmax_backward", "gradients", "scores", "tiles")
)
OPS, PARTS = "call/operator.py", "call/packing.py"
TIES = ("tests/functional/test_attention.py::test_ties_for_the_maximum_send_its_gradient_to_the_lowest_key[blocked]",)
DROPPED = (
    "tests/functional/test_attention.py::test_the_gradient_of_dropout_uses_the_weights_that_were_dropped[blocked]",
)
PACKED = ("tests/hostile/test_shapes.py::test_packed_documents_equal_a_loop_over_documents[blocked-all-top-left]",)

MUTANTS = (
    # The guards of -inf.
    Mutant("forward: no guard of -inf in the base", FORWARD, "merged.masked_fill(merged == -math.inf, 0.0)", "merged"),
    Mutant("forward: finite stand-in as the first maximum", FORWARD, "query.new_full(flat, -math.inf)", "query.new_full(flat, -1e4)"),
    Mutant("forward: no clamp of the step of an empty row", FORWARD, ".to(self.total.dtype).clamp_(min=VANISHED)", ".to(self.total.dtype)"),
    Mutant("forward: no clamp of masked distances", FORWARD, "d.clamp_(min=VANISHED)", "pass"),
    Mutant("forward: masked distances clamped too near", SCORES, "VANISHED = -1000.0", "VANISHED = -10.0"),
    Mutant("forward: sum of an empty row not guarded", FORWARD, "return torch.where(self.total > 0, self.total, 1.0).reciprocal()", "return self.total.reciprocal()"),
    Mutant("forward: log of an empty row not guarded", FORWARD, "return torch.where(self.count > 0, self.total, 1.0).log()", "return self.total.log()"),
    Mutant("backward: no guard of -inf in the base", BACKWARD, "maximum.masked_fill(maximum == -math.inf, 0.0)", "maximum"),
    Mutant("backward: no clamp of distances", BACKWARD, "        d.clamp_(min=VANISHED)\n", ""),
    Mutant("backward: empty rows not silenced", BACKWARD, "above = without_empty_rows(problem, state, upstream)", "above = upstream"),
    # The rescaling when the maximum moves.
    Mutant("rescale: never", FORWARD, "rescale=number > 0", "rescale=False"),
    Mutant("rescale: not the total", FORWARD, "for sums in (self.total, self.first_moment,", "for sums in (self.first_moment,"),
    Mutant("rescale: not the first moment", FORWARD, "for sums in (self.total, self.first_moment,", "for sums in (self.total,"),
    Mutant("rescale: first moment not moved", FORWARD, "self.first_moment += step * self.total\n", "pass\n"),
    Mutant("rescale: second moment not moved", FORWARD, "self.second_moment += step * (2 * self.first_moment + step * self.total)", "pass"),
    Mutant("rescale: second moment moved without its cross term", FORWARD, "(2 * self.first_moment + step * self.total)", "(step * self.total)"),
    Mutant("rescale: not the second moment", FORWARD, "self.second_moment, *self.weighed.values()):", "*self.weighed.values()):"),
    Mutant("rescale: not the sums of p u", FORWARD, "self.second_moment, *self.weighed.values()):", "self.second_moment):"),
    Mutant("rescale: squares by one factor only", FORWARD, "self.squares *= shrink * shrink", "self.squares *= shrink"),
    Mutant("rescale: not the output", FORWARD, "self.output *= shrink.to(self.output.dtype)[..., None]", "pass"),
    # Scores.
    Mutant("scores: scale of the wrong power", FORWARD, "query = query * multiplier", "query = query * multiplier * multiplier.abs().sqrt()"),
    Mutant("scores: backward without the multiplier", BACKWARD, "_Block(problem, rows, query * multiplier, key", "_Block(problem, rows, query, key"),
    Mutant("scores: softcap without its factor", SCORES, "values.mul_(problem.softcap)", "pass"),
    Mutant("scores: gradient of the softcap is 1", SCORES, "gradient = 1 - values * values", "gradient = torch.ones_like(values)"),
    Mutant("backward: gradient of the softcap dropped", BACKWARD, "gradient *= scores.softcap_gradient", "pass"),
    Mutant("scores: what hides under a mask counts as bad", SCORES, "grid.masked_fill_(hidden, 0.0).add_(bias.masked_fill(hidden, 0.0))", "grid.add_(bias.masked_fill(hidden, 0.0))"),
    Mutant("scores: bad rows not told", FORWARD, "row.bad |= scores.bad", "pass"),
    # Masks, windows, blocks.
    Mutant("mask: causal sees one key more", SCORES, "keys <= rows + problem.right", "keys <= rows + problem.right + 1"),
    Mutant("mask: causal sees one key less", SCORES, "keys <= rows + problem.right", "keys < rows + problem.right"),
    Mutant("mask: window one key wider on the left", SCORES, "keys >= rows - problem.left", "keys >= rows - problem.left - 1"),
    Mutant("mask: block taken for wholly visible too early (right)", SCORES, "if high - 1 <= first + problem.right", "if high - 2 <= first + problem.right"),
    Mutant("mask: block taken for wholly visible too early (left)", SCORES, "low >= last - problem.left:", "low >= last - problem.left - 1:"),
    Mutant("mask: bool mask inverted", SCORES, "masked_fill_(~block, -math.inf)", "masked_fill_(block, -math.inf)"),
    Mutant("mask: finfo.min is a bias", SCORES, "block <= torch.finfo(block.dtype).min / 2", "block < torch.finfo(block.dtype).min"),
    Mutant("mask: -1e4 is a mask", SCORES, "block <= torch.finfo(block.dtype).min / 2", "block <= -1e4"),
    Mutant("mask: structure forgotten beside a mask", SCORES, "return torch.where(structure, bias, -math.inf)", "return bias"),
    Mutant("tail: last key of the range lost", PROBLEM, "min(keys, last + problem.right + 1)", "min(keys, last + problem.right)"),
    Mutant("tail: first key of the window lost", PROBLEM, "max(0, first - problem.left)", "max(0, first - problem.left + 1)"),
    Mutant("tail: last block cut short", PROBLEM, "yield start, min(start + step, high)", "yield start, min(start + step, high - 1)"),
    Mutant("tail: last rows of a tile lost", PROBLEM, "slice(r, min(r + tile_rows, rows))", "slice(r, min(r + tile_rows, rows - 1))"),
    Mutant("alignment: offset of the diagonal dropped", PROBLEM, "device=device) + problem.offset", "device=device)"),
    # Statistics.
    Mutant("state: variance without the square of the mean", FORWARD, "(self.second_moment * inverse - mean * mean)", "(self.second_moment * inverse)"),
    Mutant("state: concentration divided once", FORWARD, "self.squares * inverse * inverse", "self.squares * inverse"),
    Mutant("state: first tokens one more", SCORES, "problem.first_tokens) - low)", "problem.first_tokens + 1) - low)"),
    Mutant("state: the key after the own one", SCORES, "[:, None] == torch.arange(low, high,", "[:, None] + 1 == torch.arange(low, high,"),
    Mutant("state: a span of the first batch", SCORES, "keys[tile.batches if keys.shape[0] > 1 else slice(None),", "keys[:1,"),
    Mutant("state: a span from the first key on", SCORES, "None, None, None, low:high]", "None, None, None, : high - low]"),
    Mutant("forward: output without the sink's share", FORWARD, "share = share * mass(problem, tile, self.maximum.to(share.dtype) + self.log_total())", "pass"),
    # Gradients.
    Mutant("backward: sink leaves dP alone", BACKWARD, "return gradient if rows.mass is None else gradient.mul_(rows.mass)", "return gradient"),
    Mutant("backward: sink leaves dV alone", BACKWARD, "applied = weights if rows.mass is None else weights * rows.mass", "applied = weights"),
    Mutant("backward: sink leaves D alone", BACKWARD, "self.dot if self.mass is None else self.mass * self.dot", "self.dot"),
    Mutant("backward: sink logit has the wrong sign", BACKWARD, "((rows.mass - 1) * rows.dot)", "((1 - rows.mass) * rows.dot)"),
    Mutant("backward: D dropped", BACKWARD, "dot = (above.output.to(problem.compute_dtype) * output).sum(-1)", "dot = (above.output.to(problem.compute_dtype) * output).sum(-1) * 0"),
    Mutant("backward: query without the multiplier", GRADIENTS, "(query_grad * multiplier).view", "query_grad.view"),
    Mutant("backward: multiplier not summed over rows it serves", GRADIENTS, "+= sum_to(gradient, grads.multiplier.shape)", "= sum_to(gradient, grads.multiplier.shape)"),
    Mutant("backward: bias not summed over rows it serves", GRADIENTS, "grads.mask[place] += sum_to(grid, grads.mask.shape)", "grads.mask[place] = sum_to(grid, grads.mask.shape)"),
    Mutant("backward: variance without its linear term", BACKWARD, "(2 * v - a)", "(-a)"),
    Mutant("backward: variance without its constant", BACKWARD, "for column in (Column.VARIANCE, *WEIGHED)", "for column in WEIGHED"),
    Mutant("backward: entropy centred on the maximum", BACKWARD, "x = d.add_(rows.state[Column.MEAN_DEPTH])", "x = d"),
    Mutant("backward: nothing falls on the maximum", BACKWARD, "gradient.scatter_add_(-1,", "gradient.clone().scatter_add_(-1,"),
    Mutant("backward: ties go to the last key", BACKWARD, "torch.where(top > best,", "torch.where(top >= best,", TIES),
    Mutant("backward: key_mass without its mean", BACKWARD, "tile.grid(gradient).add_(upstream - mean)", "tile.grid(gradient).add_(upstream)"),
    Mutant("backward: concentration without its gradient", BACKWARD, 'gradient += 2 * grad[Column.SQUARED_WEIGHTS] * weights', "pass"),
    Mutant("backward: sums of p u without their gradient", BACKWARD, ".add_(tile.grid(grad[column]) * u)", ""),
    Mutant("backward: sums of p u without their mean", BACKWARD, "(Column.VARIANCE, *WEIGHED)", "(Column.VARIANCE,)"),
    Mutant("backward: gini without its mean", GRADIENTS, "return grad * (rank - (rank * weights).sum(-1, keepdim=True))", "return grad * rank"),
    Mutant("backward: hidden NaN not kept out", BACKWARD, "careful = not surely_finite(problem)", "careful = False"),
    Mutant("forward: hidden NaN not kept out", FORWARD, "careful = not surely_finite(problem)", "careful = False"),
    Mutant("gini: ranks of hidden keys not taken off", SCORES, "dtype=count.dtype) - (keys - count)", "dtype=count.dtype)"),
    Mutant("dropout: another seed in backward", BACKWARD, "dropout(problem, applied, index, low).transpose", "dropout(problem, applied, index + 1, low).transpose", DROPPED),
    Mutant("dropout: dP with another seed than dV", BACKWARD, "transpose(1, 2)), index, low)", "transpose(1, 2)), index, low + 1)", DROPPED),
    Mutant("dropout: the same places in every tile", SCORES, "1_000_003 * index", "0 * index"),
    Mutant("dropout: the same places in every block", SCORES, "7_919 * low", "0 * low"),
    Mutant("dropout: not scaled up", SCORES, "return kept.mul_(values).div_(1 - problem.dropout_p)", "return kept.mul_(values)"),
    # The operator.
    Mutant("packed: multiplier of the first rows for all documents", PARTS, "return Document(part, rows, keys)", "return Document(part.with_fields(multiplier=whole.multiplier[:, :, : rows.stop - rows.start]), rows, keys)", PACKED),
    Mutant("packed: gradients of documents not added up", OPS, "target += gradient.to(result.dtype)", "target.copy_(gradient.to(result.dtype))", PACKED),
)  # fmt: skip
