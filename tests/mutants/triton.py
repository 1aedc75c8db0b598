# ruff: noqa: E501 (the table quotes lines of source)
"""Mutants of the Triton kernels, each with the few tests that notice it.

What is not here because it changes no result, and why:

- ``softmax.step`` guards the base of an empty row, and its step twice (where, and the maximum with VANISHED): any one of
  the three may go, for the others stand in. All together are in the table.
- ``softmax.finish`` asks for a maximum of +inf: the row's Z is NaN then, which it asks, too.
- ``softmax.weights`` guards the base of an empty row: nothing of such a row is visible, and hidden keys are set apart.
- ``softmax.finish`` makes 0.0 of a mean of -0.0: the 0.0 that is added where nothing is wrong has done so.
- ``softmax.join`` keeps the lowest score of both parts: ``decode`` masks every block, and ``hide`` has told already.
- ``decode`` stops a part at the last block: blocks behind it have no key that anybody sees.
- ``search`` lets rows rest that are done: another of Newton's steps would leave them where they are.
- ``normalizers`` takes four roundings off min_weight: which side of it a weight falls on that equals it is up to rounding.
- The order in which programs start, and which programs repeat the last row: neither is stored.
"""

from __future__ import annotations

from tests.mutants.runner import Mutant

HERE = "backends/triton"
SOFTMAX, SCORES, FORWARD, DECODE, GRADIENTS = (
    f"{HERE}/{name}.py" for name in ("softmax/state", "scores", "softmax/forward", "softmax/decode", "softmax/gradient")
)
QUERY, KEY, BIAS = (f"{HERE}/softmax/backward_{name}.py" for name in ("query", "key", "bias"))
ACCUMULATE, LAUNCH = f"{HERE}/sums.py", f"{HERE}/launch.py"

NORMALIZERS, SEARCH, ROW_STATE, ROW_GRADIENTS, ROW_FORWARD, ROW_QUERY, ROW_KEY, ROW_BIAS = (
    f"{HERE}/rowwise/{name}.py"
    for name in (
        "normalizers",
        "search",
        "state",
        "gradient",
        "forward",
        "backward_query",
        "backward_key",
        "backward_bias",
    )
)

TESTS = "tests/backends/triton"
SUMS = f"{TESTS}/test_accumulate.py"
BACKWARD = f"{TESTS}/test_backward.py"
PRECISION = f"{TESTS}/test_precision.py"
VISITS = (f"{BACKWARD}::test_every_row_that_sees_a_key_is_visited_once_and_unmasked_blocks_are_seen_whole",)
EMPTY = (f"{BACKWARD}::test_a_row_that_sees_nothing_has_no_gradient_and_gives_none_whatever_comes_from_above",)
BROADCAST = f"{BACKWARD}::test_the_gradient_of_a_bias_is_summed_over_what_it_was_broadcast_over"
TIES = (f"{BACKWARD}::test_the_gradient_of_a_maximum_goes_to_the_lowest_key_among_ties",)


def cases(*names: str) -> tuple[str, ...]:
    """Rows of the table of features, in blocks of four rows and keys, results and gradients."""
    return tuple(
        f"{TESTS}/test_agreement.py::test_blocks_of_four_rows_and_keys_change_nothing[{name}]" for name in names
    )


def parts(*names: str) -> tuple[str, ...]:
    """The same with the keys split over programs."""
    return tuple(f"{TESTS}/test_decode.py::test_five_parts_of_the_keys_agree_with_the_oracle[{name}]" for name in names)


def alone(*names: str) -> tuple[str, ...]:
    """The gradient of a statistic without values."""
    return tuple(f"{BACKWARD}::test_a_statistic_without_values_has_the_reference_gradient[{name}]" for name in names)


def sampled(*names: str) -> tuple[str, ...]:
    """The gradient of statistics of some rows."""
    return tuple(f"{BACKWARD}::test_sampled_rows_have_the_reference_gradient[{name}]" for name in names)


def packed(lengths: str, bottom_right: bool = True) -> tuple[str, ...]:
    """Documents of these lengths, results and gradients."""
    options = "{'is_causal': True, 'causal_alignment': 'bottom-right'}" if bottom_right else "{'window_size': (2, 1)}"
    return (f"{BACKWARD}::test_packed_documents_have_the_reference_gradient[{lengths}-{options}]",)


def sums(name: str) -> tuple[str, ...]:
    return (f"{SUMS}::{name}",)


def precise(name: str) -> tuple[str, ...]:
    return (f"{PRECISION}::{name}",)


def mapped(chosen: str, feature: str = "causal") -> tuple[str, ...]:
    """A rowwise normalizer, with a feature, results and gradients."""
    return (f"{TESTS}/test_rowwise.py::test_every_normalizer_agrees_with_the_reference[{chosen}-{feature}]",)


def hostile(name: str) -> tuple[str, ...]:
    return (f"{TESTS}/test_rows_hostile.py::{name}",)


BORDER = hostile("test_of_ties_at_the_border_of_top_k_the_lower_keys_win_in_values_and_gradients")
EVERYWHERE = hostile("test_hostile_rows_have_the_weights_of_the_reference")
SKIPPED = (
    f"{TESTS}/test_rowwise.py::test_blocks_without_support_are_not_multiplied_with_values_nor_visited_in_the_backward_pass",
)
ALL_SUMS = sums("test_the_sums_are_those_that_a_watch_reduces_to")
INFINITE = precise("test_a_visible_score_of_minus_infinity_spoils_its_row_whatever_is_asked_for")
NEARLY = precise("test_a_nearly_one_hot_row_keeps_its_digits_however_it_is_cut")
SETTLED = precise("test_a_row_whose_weight_is_all_on_one_key_gives_a_tiny_temperature_no_noise_from_the_output")

MUTANTS = (
    # The guards of -inf.
    Mutant("guard: step of an empty row", SOFTMAX, 'tl.where(old == -float("inf"), VANISHED, tl.maximum((old - base) * unit, VANISHED))', "(old - base) * unit", cases("mask with empty rows")),
    Mutant("guard: masked distances too near", SCORES, "VANISHED = tl.constexpr(-1000.0)", "VANISHED = tl.constexpr(-10.0)", cases("mask with empty rows")),
    Mutant("guard: masked distances left at -inf", SOFTMAX, 'd = tl.where(s == -float("inf"), VANISHED, d)', "pass", cases("causal")),
    Mutant("guard: a visible -inf passes at an edge", SOFTMAX, 'tl.where(s == -float("inf"), float("nan"), s)', "s", INFINITE),
    Mutant("guard: a visible -inf passes inside", SOFTMAX, "tl.sum(e if A & STATE else d * 0.0 + e, 1)", "tl.sum(e, 1)", INFINITE),
    Mutant("guard: a NaN in A passes", SOFTMAX, "bad = bad | (a != a)", "pass", INFINITE),
    Mutant("guard: Z of an empty row", SOFTMAX, "z = tl.where(full, z, 1.0)", "pass", cases("mask with empty rows")),
    Mutant("guard: a square that overflows meets a weight of 0", SOFTMAX, "tl.sum(e * x * x, 1)", "tl.sum(e * (x * x), 1)", precise("test_scores_whose_squares_overflow_leave_every_statistic_and_gradient_finite")),
    Mutant("guard: distances of recomputed scores not kept from overflow", SOFTMAX, "tl.minimum(tl.maximum(d, VANISHED), 0.0)", "tl.minimum(d, 0.0)", precise("test_scores_whose_squares_overflow_leave_every_statistic_and_gradient_finite")),
    Mutant("guard: hidden keys keep a weight in the backward pass", SOFTMAX, "d = tl.where(visible, d, VANISHED)", "pass", cases("causal")),
    # Rescaling, pairs.
    Mutant("rescale: Z", SOFTMAX, "return m, z * shrink, zl * shrink, a", "return m, z, zl, a", cases("ascending causal")),
    Mutant("rescale: A not moved", SOFTMAX, "a, al = add(a, al, down * z)", "pass", cases("ascending causal")),
    Mutant("rescale: A not shrunk", SOFTMAX, "a, al = a * shrink, (al + down * zl) * shrink", "a, al = a, al + down * zl", cases("ascending causal")),
    Mutant("rescale: B", SOFTMAX, "b, bl = b * shrink, bl * shrink", "pass", cases("ascending causal")),
    Mutant("rescale: C by one factor only", SOFTMAX, "c * (shrink * shrink), cl * (shrink * shrink)", "c * shrink, cl * shrink", cases("ascending causal")),
    Mutant("rescale: first tokens", SOFTMAX, "f = f * shrink", "pass", cases("plain")),
    Mutant("rescale: distances", SOFTMAX, "t = t * shrink", "pass", cases("ascending causal")),
    Mutant("rescale: the own key", SOFTMAX, "own = own * shrink", "pass", cases("ascending scores")),
    Mutant("rescale: spans", SOFTMAX, "span = span * shrink", "pass", cases("ascending causal")),
    Mutant("rescale: the output", FORWARD, "product(e.to(values.dtype), values, out * shrink[:, None])", "product(e.to(values.dtype), values, out)", cases("ascending causal")),
    Mutant("spread: about the maximum", SOFTMAX, "x = d - (block_a / tl.where(block_z > 0, block_z, 1.0))[:, None]", "x = d", cases("plain")),
    Mutant("spread: means of blocks taken as equal", SOFTMAX, "b, bl = add(b, bl, apart)", "pass", cases("plain")),
    Mutant("pair: Z in plain float32", SOFTMAX, "z, zl = add(z, zl, block_z)", "z = z + block_z", NEARLY),
    Mutant("pair: A in plain float32", SOFTMAX, "a, al = add(a, al, block_a)", "a = a + block_a", NEARLY),
    Mutant("pair: B in plain float32", SOFTMAX, "b, bl = add(b, bl, block_b)", "b = b + block_b", NEARLY),
    Mutant("pair: C in plain float32", SOFTMAX, "c, cl = add(c, cl, tl.sum(e * e, 1))", "c = c + tl.sum(e * e, 1)", NEARLY),
    Mutant("pair: low part of A not moved", SOFTMAX, "(al + down * zl) * shrink", "al * shrink", NEARLY),
    Mutant("pair: rounding of a sum lost", SOFTMAX, "low + ((high - (total - part)) + (more - part))", "low", NEARLY),
    Mutant("log: low part of Z lost", SOFTMAX, "u * (lost + small) + small) / below", "u * lost) / below", NEARLY),
    Mutant("log: a coefficient", SOFTMAX, "u * w * (2.0 / 3 + w * (2.0 / 5 +", "u * w * (2.0 / 3 + w * (2.0 / 6 +", cases("plain")),
    Mutant("log: the exponent's low part", SOFTMAX, "whole * LN2_LOW", "0.0", precise("test_the_logarithm_of_a_pair_is_right_to_six_tenths_of_the_last_digit")),
    Mutant("log: low part of Z above the line only", SOFTMAX, "u * (lost + small) + small) / below", "u * lost + small) / below", precise("test_the_logarithm_of_a_pair_is_right_to_six_tenths_of_the_last_digit")),
    Mutant("log: rounding of the quotient", SOFTMAX, "        left = (total - product) - rounding", "        left = 0.0", precise("test_the_logarithm_of_a_pair_is_right_to_six_tenths_of_the_last_digit")),
    # The state.
    Mutant("state: C divided once", SOFTMAX, "square = (c + cl) / z / z", "square = (c + cl) / z", cases("plain")),
    Mutant("state: visible keys of the last block only", SOFTMAX, "f, t, n + more, own, span), e, shrink", "f, t, more + 0 * n, own, span), e, shrink", cases("plain")),
    Mutant("state: first tokens inverted", SOFTMAX, "f + tl.sum(tl.where(first, e, 0.0), 1)", "f + tl.sum(tl.where(first, 0.0, e), 1)", cases("three first tokens")),
    Mutant("state: one first token more", SCORES, "tile.origin[:, None] < call.first_tokens", "tile.origin[:, None] <= call.first_tokens", cases("three first tokens")),
    Mutant("state: first tokens of the first document only", FORWARD, "first_limit = tl.max(origin, 0) + first_tokens", "first_limit = tl.min(origin, 0) + first_tokens", packed("longer keys") + precise("test_first_tokens_of_every_document_count")),
    Mutant("state: marked first tokens ignored", SCORES, "(marked & FIRST_MARK) != 0", "(marked & FIRST_MARK) > 7", cases("left padding")),
    Mutant("state: marks of a span are those of first tokens", SCORES, "(marked & SPAN_MARK) != 0", "(marked & FIRST_MARK) != 0", cases("left padding")),
    Mutant("state: the key after the own one", SCORES, "tile.diagonal[:, None] == place[None, :]", "tile.diagonal[:, None] + 1 == place[None, :]", cases("causal")),
    Mutant("state: distance with its sign", SCORES, "tl.abs(tile.diagonal[:, None] - place[None, :])", "(tile.diagonal[:, None] - place[None, :])", cases("window")),
    # Scores.
    Mutant("scores: no multiplier", SCORES, "    unit = tl.abs(tile.scale)", "    unit = 0.0 * tile.scale + 1.0", cases("plain")),
    Mutant("scores: no multiplier under a bias", SCORES, "    elif CALL.MASK == BIAS:\n        x = x * tile.scale[:, None]", "", cases("bias")),
    Mutant("scores: a negative scale does not turn them", SCORES, "x = tl.where((tile.scale < 0)[:, None], -x, x)", "pass", cases("negative scale")),
    Mutant("scores: softcap without its factor", SCORES, "x = bent * call.softcap", "x = bent", cases("softcap")),
    Mutant("scores: gradient of the softcap is 1", SCORES, "gradient = 1.0 - bent * bent", "gradient = 1.0 + 0.0 * bent", cases("softcap")),
    Mutant("scores: tanh of a negative number", SCORES, "tl.where(x < 0, -far, far)", "far", cases("softcap")),
    Mutant("scores: tanh cancels near 0", SCORES, "size > 0.6", "size > -0.6", precise("test_a_softcap_that_bends_little_keeps_the_digits_of_small_scores")),
    Mutant("scores: tanh's series too far", SCORES, "size > 0.6", "size > 1.2", cases("softcap")),
    Mutant("scores: columns past the head size inside", SCORES, "    return tl.load(pointers, mask=(column < D)[None, :], other=0.0)", "    return tl.load(pointers, mask=(column < D)[None, :], other=1.0)", (f"{TESTS}/test_agreement.py::test_ragged_shapes_agree[K=97, D=3, E=5, ascending]",)),
    # Masks, windows, documents.
    Mutant("mask: causal sees one key more", SCORES, "tl.minimum(diagonal + structure.right + 1, end)", "tl.minimum(diagonal + structure.right + 2, end)", cases("causal")),
    Mutant("mask: causal sees one key less", SCORES, "tl.minimum(diagonal + structure.right + 1, end)", "tl.minimum(diagonal + structure.right, end)", cases("causal")),
    Mutant("mask: window one key wider on the left", SCORES, "tl.maximum(diagonal - structure.left, first)", "tl.maximum(diagonal - structure.left - 1, first)", cases("window")),
    Mutant("mask: window one key narrower on the left", SCORES, "tl.maximum(diagonal - structure.left, first)", "tl.maximum(diagonal - structure.left + 1, first)", cases("window")),
    Mutant("mask: keys past the end", SCORES, "high = tl.minimum(diagonal + structure.right + 1, end)", "high = diagonal + structure.right + 1", cases("window past the keys")),
    Mutant("mask: keys of the document before", SCORES, "low = tl.maximum(diagonal - structure.left, first)", "low = tl.maximum(diagonal - structure.left, 0)", packed("longer keys")),
    Mutant("mask: alignment dropped", SCORES, "diagonal += structure.offset", "pass", cases("causal bottom-right")),
    Mutant("mask: alignment of documents dropped", SCORES, "diagonal += (end - first) - (over - begun)", "pass", packed("longer keys")),
    Mutant("mask: documents begin at row 0", SCORES, "diagonal = first + row - begun", "diagonal = first + row", packed("longer keys", bottom_right=False)),
    Mutant("mask: a row of the next document", SCORES, "ended = tl.load(starts + middle + 1, mask=open_, other=0).to(tl.int32) <= row", "ended = tl.load(starts + middle + 1, mask=open_, other=0).to(tl.int32) < row", packed("many of one token")),
    Mutant("mask: positions ignored", SCORES, "            diagonal = tl.load(structure.positions + row).to(tl.int32)", "            diagonal = row", sampled("bottom-right")),
    Mutant("mask: positions of documents counted from 0", SCORES, "diagonal = first + tl.load(structure.positions + row).to(tl.int32)", "diagonal = tl.load(structure.positions + row).to(tl.int32)", VISITS + precise("test_sampled_rows_of_documents_stand_at_their_own_places")),
    Mutant("mask: bool mask inverted", SCORES, "visible = visible & (given != 0)", "visible = visible & (given == 0)", cases("mask per head")),
    Mutant("mask: bias dropped", SCORES, "bias = tl.where(visible, given, 0.0)", "bias = 0.0 * given", cases("bias")),
    Mutant("mask: finfo.min is a bias", SCORES, "visible = visible & ((given <= CALL.LIMIT) == 0)", 'visible = visible & (given > -float("inf"))', cases("bias")),
    Mutant("mask: -1e4 is a mask", LAUNCH, "torch.finfo(mask.dtype).min / 2", "-5000.0", cases("bias")),
    Mutant("mask: a float64 bias beyond float32 hides", SCORES, "tl.where(given < -1.7e38, -1.7e38, given).to(tl.float32)", "given.to(tl.float32)", precise("test_a_float64_bias_beyond_float32_leaves_its_key_visible")),
    Mutant("mask: row of a broadcast mask", LAUNCH, "0 if sizes[2] == 1 else strides[2]", "strides[2]", cases("mask one row high", "bias one key wide")),
    Mutant("mask: a block that only some row sees is skipped", FORWARD, "visit = any_of(visible) > 0", "visit = tl.min(tl.max(visible.to(tl.int32), 1), 0) > 0", cases("mask with empty rows")),
    Mutant("mask: the head of a mask per head", SCORES, "tile.head.to(tl.int64) * mask.head", "(tile.head // 2).to(tl.int64) * mask.head", cases("mask per head")),
    # Blocks and their tails.
    Mutant("blocks: wholly visible too early (left)", SCORES, "tl.cdiv(tl.max(low, 0), BLOCK_N) * BLOCK_N, last), start)", "tl.cdiv(tl.min(low, 0), BLOCK_N) * BLOCK_N, last), start)", cases("window")),
    Mutant("blocks: wholly visible too long (right)", SCORES, "tl.minimum(tl.min(high, 0) // BLOCK_N", "tl.minimum(tl.max(high, 0) // BLOCK_N", cases("causal bottom-right")),
    Mutant("blocks: last keys lost", SCORES, "last = tl.cdiv(end, BLOCK_N) * BLOCK_N", "last = end // BLOCK_N * BLOCK_N", cases("plain")),
    Mutant("blocks: first block of a window lost", SCORES, "start = tl.minimum(start, end) // BLOCK_N * BLOCK_N", "start = tl.minimum(start + BLOCK_N - 1, end) // BLOCK_N * BLOCK_N", cases("window")),
    Mutant("blocks: edges in the wrong place", SCORES, "tl.where(number < before,", "tl.where(number <= before,", cases("causal bottom-right")),
    Mutant("blocks: an inside block lost (forward)", FORWARD, "range(inside_from, inside_to, CALL.BLOCK_N)", "range(inside_from + CALL.BLOCK_N, inside_to, CALL.BLOCK_N)", cases("plain")),
    Mutant("blocks: an inside block lost (dq)", QUERY, "range(inside_from, inside_to, CALL.BLOCK_N)", "range(inside_from + CALL.BLOCK_N, inside_to, CALL.BLOCK_N)", cases("plain")),
    Mutant("blocks: an inside block lost (dk, dv)", KEY, "insides = (inside_to - inside_from) // CALL.BLOCK_M", "insides = (inside_to - inside_from) // CALL.BLOCK_M - 1", cases("causal, more rows than keys")),
    Mutant("heads: the key head (forward)", FORWARD, "batch, head, head // repeats)", "batch, head, head % (heads // repeats))", cases("grouped heads")),
    Mutant("heads: the key head (dq)", SCORES, "head // call.repeats", "head % (call.heads // call.repeats)", cases("grouped heads")),
    Mutant("heads: the key head (bias)", BIAS, "group = head // repeats", "group = head % (heads // repeats)", cases("grouped heads, mask per head")),
    Mutant("heads: only the first query head of a key head (edges)", KEY, "range(edges * repeats)", "range(edges)", cases("grouped heads")),
    Mutant("heads: only the first query head of a key head (inside)", KEY, "range(insides * repeats)", "range(insides)", cases("grouped heads")),
    Mutant("heads: query heads of the first key head (edges)", KEY, "head = group * repeats + number // edges", "head = number // edges", cases("grouped heads")),
    Mutant("multiplier: of the first row (forward)", SCORES, "tl.load(base + row * multiplier.row)", "tl.load(base + 0 * row)", cases("temperature per row")),
    Mutant("multiplier: of the first head (dq)", SCORES, "multiplier.batch + head * multiplier.head", "multiplier.batch + 0 * head", cases("temperature per head")),
    Mutant("multiplier: of the first batch (dk)", SCORES, "multiplier.pointer + batch.to(tl.int64) * multiplier.batch + head", "multiplier.pointer + head", cases("temperature everywhere")),
    Mutant("64 bits: offsets inside a block", SCORES, "local[:, None].to(tl.int64) * matrix.row", "local[:, None] * matrix.row", precise("test_rows_that_lie_gigabytes_apart_are_reached")),
    Mutant("64 bits: not asked for", LAUNCH, ">= 1 << 31", ">= 1 << 60", precise("test_rows_that_lie_gigabytes_apart_are_reached")),
    Mutant("64 bits: offsets of the beginning", SCORES, "base += tl.cast(begin, tl.int64) * matrix.row", "base += begin * matrix.row", precise("test_rows_that_lie_gigabytes_apart_are_reached")),
    # Sinks and the output.
    Mutant("output: not divided", FORWARD, "part = 1.0 / total", "part = 1.0 + 0.0 * total", cases("plain")),
    Mutant("sink: the maximum in place of lse", FORWARD, "softmax.share(left[0] + left[1],", "softmax.share(left[0],", cases("sink")),
    Mutant("sink: a sink above lse takes nothing", SOFTMAX, "tl.where(gap > 0, 1.0, small)", "1.0", precise("test_a_sink_beside_a_settled_row_still_moves_its_score")),
    # Parts of the keys.
    Mutant("parts: the last blocks lost", DECODE, "each = tl.cdiv(number, splits)", "each = number // splits", parts("one row")),
    Mutant("parts: heads of rows", DECODE, "head = group * repeats + taken // structure.rows", "head = group * repeats + taken % repeats", parts("grouped heads, mask per head")),
    Mutant("parts: what is joined is not shrunk", SOFTMAX, "step(other[0], new, LOG2E)", "step(rows[0], new, LOG2E)", parts("ascending causal")),
    Mutant("parts: the spread between them", SOFTMAX, "spread(z, a, b, z2, a2, b2)", "0.0 * z", parts("one row")),
    Mutant("parts: C of the other", SOFTMAX, "add(c, cl + cl2, c2)", "add(c, cl + cl2, 0.0 * c2)", parts("one row")),
    Mutant("parts: first tokens of the other", SOFTMAX, "f + f2, t + t2,", "f, t + t2,", parts("left padding")),
    Mutant("parts: visible keys of the other", SOFTMAX, "t + t2, n + n2", "t + t2, n", parts("one row")),
    Mutant("parts: Z in plain float32", SOFTMAX, "z, zl = add(z, zl + zl2, z2)", "z, zl = z + z2, zl + zl2", NEARLY),
    Mutant("parts: the output so far not shrunk", DECODE, "out * shrink[:, None] + more * fade[:, None]", "out + more * fade[:, None]", parts("ascending causal")),
    Mutant("parts: the sink of another head", DECODE, "head = place // queries % heads", "head = place % heads", parts("sink, empty rows")),
    # Gradients.
    Mutant("gradients: D dropped", GRADIENTS, "along -= mass * dot", "pass", cases("plain")),
    Mutant("gradients: sink leaves D alone", GRADIENTS, "along -= mass * dot", "along -= dot", cases("sink")),
    Mutant("gradients: sink leaves dP alone", GRADIENTS, "reached *= mass[:, None]", "pass", cases("sink")),
    Mutant("gradients: sink leaves dV alone", GRADIENTS, "applied = p * mass[:, None]", "applied = p", cases("sink")),
    Mutant("gradients: sign of the sink's gradient", GRADIENTS, "(mass - 1.0) * dot", "(1.0 - mass) * dot", cases("sink")),
    Mutant("gradients: an empty row gives its gradient on", GRADIENTS, "full = exists & (state[2] > 0)", "full = exists", precise("test_an_empty_row_gives_the_sink_nothing_whatever_comes_from_above")),
    Mutant("gradients: hidden keys keep a gradient", GRADIENTS, "ds = tl.where(visible, ds, 0.0)", "pass", EMPTY),
    Mutant("gradients: the key beside the maximum", GRADIENTS, "place[None, :] == winner[:, None]", "place[None, :] == winner[:, None] + 1", TIES),
    Mutant("gradients: first tokens", GRADIENTS, "gradient += tl.where(first_of(tile, place, call, CALL), above[6][:, None], 0.0)", "pass", cases("three first tokens")),
    Mutant("gradients: distance", GRADIENTS, "gradient += above[7][:, None] * distance_of(tile, place)", "pass", cases("window")),
    Mutant("gradients: the own key", GRADIENTS, "gradient += tl.where(own_of(tile, place), above[8][:, None], 0.0)", "pass", cases("window")),
    Mutant("gradients: spans", GRADIENTS, "gradient += tl.where(span_of(tile, place, call), above[9][:, None], 0.0)", "pass", cases("window")),
    Mutant("settled: never", GRADIENTS, "settled = state[1] == 0.0", "settled = state[1] < 0.0", SETTLED),
    Mutant("settled: output keeps its part", QUERY, "tl.where(settled, structure.rows, row)", "row", SETTLED),
    Mutant("settled: output keeps its constant", GRADIENTS, "constant = tl.where(settled, constant_gradient(state, above, CALL.STATE), constant)", "pass", SETTLED),
    Mutant("settled: beside a sink, too", GRADIENTS, "settled &= mass == 1.0", "pass", precise("test_a_sink_beside_a_settled_row_still_moves_its_score")),
    Mutant("gradients: A's constant", SOFTMAX, "constant -= above[3]", "pass", alone("entropy")),
    Mutant("gradients: B's constant", SOFTMAX, "constant -= above[4] * state[4]", "pass", alone("logit_variance")),
    Mutant("gradients: B's linear term", SOFTMAX, "(2.0 * above[4] - above[3])", "(-above[3])", alone("logit_variance")),
    Mutant("gradients: C's constant", SOFTMAX, "constant -= 2.0 * above[5] * state[5]", "pass", alone("effective_tokens")),
    Mutant("gradients: C's own", SOFTMAX, "gradient += 2.0 * above[5][:, None] * p", "pass", alone("effective_tokens")),
    Mutant("gradients: first tokens' constant", SOFTMAX, "constant -= above[6] * state[6]", "pass", alone("first_token_mass")),
    Mutant("gradients: distance's constant", SOFTMAX, "constant -= above[7] * state[7]", "pass", cases("window")),
    Mutant("gradients: the own key's constant", SOFTMAX, "constant -= above[8] * state[8]", "pass", cases("window")),
    Mutant("gradients: spans' constant", SOFTMAX, "constant -= above[9] * state[9]", "pass", cases("window")),
    Mutant("gradients: about the maximum", SOFTMAX, "x = d + state[3][:, None]", "x = d", alone("entropy")),
    Mutant("gradients: nothing on the maximum", SOFTMAX, "return above[0] - above[1] + above[3]", "return 0.0 * above[0]", cases("plain")),
    Mutant("gradients: nothing on the maximum, without A", SOFTMAX, "+ above[3]\n    return above[0] - above[1]", "+ above[3]\n    return 0.0 * above[0]", alone("max_weight")),
    Mutant("winner: last of the ties", FORWARD, "((top == rows[0]) & (at < best))", "(top == rows[0])", TIES),
    Mutant("winner: counted from the block", FORWARD, "at += start", "pass", alone("max_logit")),
    Mutant("dq: gradient of the softcap", QUERY, "product((ds * bend).to(block.dtype), block, dq)", "product(ds.to(block.dtype), block, dq)", cases("softcap")),
    Mutant("dq: no multiplier", QUERY, "(dq * tile.scale[:, None]).to(query_grad.dtype.element_ty)", "dq.to(query_grad.dtype.element_ty)", cases("plain")),
    Mutant("dq: temperature's gradient without q", QUERY, "tl.sum(dq * tile.query.to(tl.float32), 1)", "tl.sum(dq, 1)", cases("temperature per head")),
    Mutant("dk: no multiplier", KEY, "(ds * bend * scale[:, None]).to(q.dtype)", "(ds * bend).to(q.dtype)", cases("plain")),
    Mutant("dk: gradient of the softcap", KEY, "(ds * bend * scale[:, None]).to(q.dtype)", "(ds * scale[:, None]).to(q.dtype)", cases("softcap")),
    Mutant("dk: empty rows are read", KEY, "tl.where(exists & (terms[0][2] > 0), row, structure.rows)", "row", EMPTY),
    Mutant("rows of keys: one too late", KEY, "least = key - structure.right - structure.offset", "least = key - structure.right - structure.offset + 1", VISITS),
    Mutant("rows of keys: one too few", KEY, "most = key + structure.left - structure.offset + 1", "most = key + structure.left - structure.offset", VISITS),
    Mutant("rows of keys: search by position", KEY, "mask=open_, other=0).to(tl.int32) < bound", "mask=open_, other=0).to(tl.int32) <= bound", VISITS),
    Mutant("rows of keys: alignment of documents", KEY, "shift -= (end - first) - (over - begun)", "pass", VISITS),
    Mutant("rows of keys: last of a document", KEY, "key + structure.left + shift + 1, begun), over)", "key + structure.left + shift, begun), over)", VISITS),
    Mutant("rows of keys: positions in documents", KEY, "_first_at(key - first - structure.right,", "_first_at(key - structure.right,", VISITS),
    Mutant("rows of keys: seen whole too early", KEY, "tl.cdiv(tl.max(seen_from, 0), BLOCK_M)", "tl.cdiv(tl.min(seen_from, 0), BLOCK_M)", VISITS),
    Mutant("rows of keys: seen whole too long", KEY, "tl.min(seen_to, 0) // BLOCK_M", "tl.max(seen_to, 0) // BLOCK_M", VISITS),
    Mutant("rows of keys: last block of rows lost", KEY, "last = tl.cdiv(end, BLOCK_M) * BLOCK_M", "last = end // BLOCK_M * BLOCK_M", VISITS),
    Mutant("bias: one batch of many", BIAS, "batch = own[0] + number // over_rows // over_heads", "batch = own[0] + 0 * number", (f"{BROADCAST}[(1, 4, 9)-float32]",)),
    Mutant("bias: one head of many", BIAS, "head = own[1] + number // over_rows % over_heads", "head = own[1] + 0 * number", (f"{BROADCAST}[(2, 1, 9)-float32]",)),
    Mutant("bias: one block of rows of many", BIAS, "own[2] + number % over_rows", "own[2] + 0 * number", (f"{BROADCAST}[(2, 4, 1)-float32]",)),
    Mutant("bias: not added up", BIAS, "total += ds", "total = ds", (f"{BROADCAST}[(1, 1, 1)-float32]",)),
    Mutant("bias: rows past the end count", BIAS, "high = tl.where(exists, high, 0)", "pass", (f"{BROADCAST}[(2, 4, 1)-float32]",)),
    Mutant("bias: a block that some rows see in part is left out", BIAS, "(high > tl.min(place, 0))", "(high > tl.max(place, 0))", (f"{BROADCAST}[(2, 4, 9)-float32]",)),
    # Sums on the device.
    Mutant("flag: sums are added while it is down", ACCUMULATE, "if tl.load(flag) == 0:\n        return\n    head = tl.program_id(0).to", "head = tl.program_id(0).to", sums("test_while_the_flag_is_down_no_row_is_measured")),
    Mutant("flag: rows are measured while it is down", FORWARD, "if tl.load(flag) == 0:", "if tl.load(flag) == 7:", sums("test_while_the_flag_is_down_no_row_is_measured")),
    Mutant("sampled rows: the first ones", FORWARD, "        row = tl.load(structure.positions + row).to(tl.int32)", "        row = row + 0", sums("test_chosen_rows_are_measured_at_their_own_places")),
    Mutant("sums: rows that are not tokens", ACCUMULATE, "counted = counted & (tl.load(at, mask=counted, other=0) != 0)", "pass", sums("test_rows_that_are_not_tokens_are_left_out")),
    Mutant("sums: rows without keys are valid", ACCUMULATE, "seen = counted & (n > 0)", "seen = counted", ALL_SUMS),
    Mutant("sums: rows that are not finite are valid", ACCUMULATE, "valid = seen & finite", "valid = seen", ALL_SUMS),
    Mutant("sums: normalised entropy of one key", ACCUMULATE, "two = valid & (n > 1)", "two = valid & (n > 0)", ALL_SUMS),
    Mutant("sums: first tokens of rows that see no more", ACCUMULATE, "beyond = valid & (n > first_tokens)", "beyond = valid & (n >= first_tokens)", ALL_SUMS),
    Mutant("flag: rows are summed while it is down", ACCUMULATE, "if tl.load(flag) == 0:\n        return\n    head = tl.program_id(0)\n", "head = tl.program_id(0)\n", sums("test_while_the_flag_is_down_no_row_is_measured")),
    Mutant("sums: the last block only", ACCUMULATE, "single[4] + _of(entropy, valid)", "_of(entropy, valid)", sums("test_however_rows_are_cut_into_chunks_the_sums_are_the_same")),
    Mutant("sums: the last chunks only", ACCUMULATE, "total += tl.sum(more, 0)", "total = tl.sum(more, 0)", sums("test_however_rows_are_cut_into_chunks_the_sums_are_the_same")),
    Mutant("sums: the last maximum only", ACCUMULATE, "greatest = tl.maximum(greatest, tl.max(tl.where(there, more, -float(\"inf\")), 0))", "greatest = tl.max(tl.where(there, more, -float(\"inf\")), 0)", sums("test_however_rows_are_cut_into_chunks_the_sums_are_the_same")),
    Mutant("sums: a chunk that is not there", ACCUMULATE, "tl.where(there, more, -float(\"inf\"))", "more", sums("test_a_maximum_below_0_is_kept")),
    Mutant("sums: chunks that overlap", ACCUMULATE, "(chunk + 1) * each, batches", "(chunk + 2) * each, batches", sums("test_however_rows_are_cut_into_chunks_the_sums_are_the_same")),
    Mutant("bins: one of 32 lost", ACCUMULATE, "(normalized * 32).to(tl.int32)", "(normalized * 31).to(tl.int32)", ALL_SUMS),
    Mutant("bins: twice as many visible keys", ACCUMULATE, ">> 23) - 127", ">> 23) - 126", ALL_SUMS),
    Mutant("bins: rows that do not count", ACCUMULATE, "(bin[:, None] == place[None, :]) & counted[:, None]", "bin[:, None] == place[None, :]", ALL_SUMS),
    # Rowwise normalizers.
    Mutant("normalizers: entmax15 is not squared", NORMALIZERS, "omega = omega * omega", "pass", mapped("entmax15")),
    Mutant("normalizers: log1p loses the digits of small numbers", NORMALIZERS, "x = tl.where(k == 0, u, f - 1.0)", "x = f - 1.0", mapped("entmax near 1")),
    Mutant("normalizers: alpha of 1 is not softmax", NORMALIZERS, "limit = number < LIMIT_OF_SOFTMAX", "limit = number < -1.0", mapped("entmax near 1")),
    Mutant("normalizers: ties beyond the border of top-k stay", NORMALIZERS, "(place[None, :] < second[:, None])", "(place[None, :] >= 0)", BORDER),
    Mutant("search: the largest does not stay above min_weight", SEARCH, "* MIN_WEIGHT_SLACK, 1.0)", "* MIN_WEIGHT_SLACK, 9.0)", hostile("test_the_share_of_equal_keys_is_not_below_itself")),
    Mutant("normalizers: sigmoids as they are, not relative to the largest", NORMALIZERS, "logs = tl.where(top < 0, d, tl.minimum(z, 0.0))", "logs = tl.where(top < 0, z, tl.minimum(z, 0.0))", hostile("test_sigmoids_far_below_0_have_no_mass_and_no_entropy")),
    Mutant("normalizers: gradient of entmax15 is that of sparsemax", NORMALIZERS, "        return tl.sqrt(p)", "        return tl.where(p > 0, 1.0, 0.0)", mapped("entmax15")),
    Mutant("normalizers: gradient of entmax without its row's sum", NORMALIZERS, "(1.0 - number) * (logs - log_total[:, None])", "(1.0 - number) * logs", mapped("entmax")),
    Mutant("normalizers: gradient of alpha without its curve", NORMALIZERS, "return y, y * y * tl.where(x < 0.5, near, far)", "return y, 0.5 * y * y", mapped("entmax")),
    Mutant("search: one step of Newton's", SEARCH, "last = (excess <= CLOSE) | (after >= pi)", "last = excess > -1.0", mapped("sparsemax")),
    Mutant("search: the row that is done last decides", SEARCH, "while (tl.min(done.to(tl.int32), 0) == 0)", "while (tl.max(done.to(tl.int32), 0) == 0)", EVERYWHERE),
    Mutant("search: the last block of a list is lost", SEARCH, "            left += wanted\n        count = left", "            left += wanted\n        count = tl.maximum(left - 1, 1)", mapped("entmax15")),
    Mutant("search: a block that one row needs is dropped", SEARCH, "wanted = any_of(omega > 0)", "wanted = any_of(omega > 0.9)", mapped("entmax")),
    Mutant("search: no bracket above alpha = 2", SEARCH, "after = tl.where(outside, tl.sqrt(low * high), after)", "pass", hostile("test_above_alpha_of_2_where_newtons_steps_alone_would_never_end_every_row_has_its_weights")),
    Mutant("search: one key more than k", SEARCH, "k = tl.minimum(n, tl.minimum(number, 1e9).to(tl.int32))", "k = tl.minimum(n, tl.minimum(number, 1e9).to(tl.int32) + 1)", mapped("topk")),
    Mutant("search: one tie more than there is room for", SEARCH, "late = (tied > 0) & (number > room[:, None])", "late = (tied > 0) & (number > room[:, None] + 1)", BORDER),
    Mutant("search: ties counted in each block anew", SEARCH, "number = met[:, None] + tl.cumsum(tied, 1)", "number = tl.cumsum(tied, 1)", BORDER),
    Mutant("search: min_weight of the largest, not of the sum", SEARCH, "tl.minimum(min_weight * (total + low) * MIN_WEIGHT_SLACK, 1.0)", "tl.minimum(min_weight * MIN_WEIGHT_SLACK, 1.0)", mapped("threshold")),
    Mutant("search: a score that is not finite passes", SEARCH, "bad + tl.sum((visible & (finite == 0)).to(tl.int32), 1)", "bad", hostile("test_a_score_that_is_not_finite_spoils_its_row_alone_and_what_is_hidden_spoils_none")),
    Mutant("rows: a block without weight meets its values", ROW_FORWARD, "if any_of(omega > 0) > 0:", "if any_of(omega > -1) > 0:", SKIPPED),
    Mutant("rows: output not divided", ROW_STATE, "    scale = inverse\n", "    scale = 0.0 * inverse + 1.0\n", mapped("entmax15")),
    Mutant("rows: entropy without log Z", ROW_STATE, "log_of(z, zl) - (h + hl) / z", "-(h + hl) / z", mapped("entmax15")),
    Mutant("rows: spread of blocks taken as equal", ROW_STATE, "b, bl = add(b, bl, spread(z, a, 0.0, block_z, block_a, 0.0))", "pass", mapped("sigmoid", "plain")),
    Mutant("rows: concentration divided once", ROW_STATE, "(c + cl) * inverse * inverse", "(c + cl) * inverse", mapped("entmax15")),
    Mutant("rows: a sigmoid's mass is that of the largest", ROW_STATE, "mass = top * z", "mass = top + 0.0 * z", mapped("sigmoid")),
    Mutant("rows: gradient not centred", ROW_GRADIENTS, "relative = gradient + b - facts.along[:, None]", "relative = gradient + b", mapped("sparsemax")),
    Mutant("rows: sigmoid's gradient without its rest", ROW_GRADIENTS, "ds = sigmoid(-z) * (", "ds = (", mapped("sigmoid")),
    Mutant("rows: statistics of sigmoids not centred", ROW_GRADIENTS, "(b - facts.mean_gradient[:, None])", "b", mapped("sigmoid")),
    Mutant("rows: variance owes nothing to scores", ROW_GRADIENTS, "direct += 2.0 * facts.above[8][:, None] * (d + facts.mean[:, None])", "pass", mapped("entmax15")),
    Mutant("rows: gradient of entropy lost", ROW_GRADIENTS, "b -= above[7][:, None] * logs", "pass", mapped("entmax15")),
    Mutant("rows: nothing falls on the maximum", ROW_GRADIENTS, "peak[:, None], 0.0)", "0.0 * peak[:, None], 0.0)", mapped("entmax15")),
    Mutant("rows: a marked block is not marked", ROW_QUERY, "tl.store(marks + at // CALL.BLOCK_N, wanted.to(tl.uint8))", "tl.store(marks + at // CALL.BLOCK_N, (wanted * 0).to(tl.uint8))", mapped("entmax15")),
    Mutant("rows: every block is marked", ROW_QUERY, "tl.store(marks + at // CALL.BLOCK_N, wanted.to(tl.uint8))", "tl.store(marks + at // CALL.BLOCK_N, (wanted * 0 + 1).to(tl.uint8))", SKIPPED),
    Mutant("rows: ties not cut in the backward pass", ROW_QUERY, "room = tl.where(over + tied > k, k - over, EVERY)", "room = tl.where(over + tied > k + 99, k - over, EVERY)", BORDER),
    Mutant("rows: alpha's gradient without B", ROW_QUERY, "(b_sum * g_sum - gb_sum -", "(0.0 - gb_sum -", mapped("entmax")),
    Mutant("rows: the bias of sigmoids without what is centred", ROW_QUERY, "rg_sum + along * r_sum - b_sum * e_sum", "rg_sum + along * r_sum", mapped("sigmoid")),
    Mutant("rows: dq without the softcap's gradient", ROW_QUERY, "product((ds * bend).to(k.dtype), k, dq)", "product(ds.to(k.dtype), k, dq)", mapped("entmax15", "bias, softcap, temperature")),
    Mutant("rows: only the first query head of a key head", ROW_KEY, "range(count * repeats)", "range(count)", mapped("entmax15")),
    Mutant("rows: dk without the multiplier", ROW_KEY, "(ds * bend * tile.scale[:, None])", "(ds * bend)", mapped("entmax15")),
    Mutant("rows: a bias takes the first batch alone", ROW_BIAS, "range(over_batches * over_heads * over_rows)", "range(over_heads * over_rows)", (f"{TESTS}/test_rowwise.py::test_the_gradient_of_a_bias_is_summed_over_what_it_was_broadcast_over",)),
)  # fmt: skip
