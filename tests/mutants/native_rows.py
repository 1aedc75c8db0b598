# ruff: noqa: E501 (the table quotes lines of source)
"""Mutants of the native kernels of the other normalizers, each with the tests that notice it.

What is not here because it changes no result, and why:

- Newton's step on the square root of entmax15's sum, the sample and the few digits with which entmax begins, the maxima of
  groups of top-k: with a plainer step, a bound of 1, all digits and no lower bound, the same is found more slowly. That a
  bound is wrong, and that few digits are the last, is here.
- ``steep_weight`` gives keys at the maximum their weight whatever w0^q underflows to: without, they would jump from 0 to it
  there, and a jump is shared.
- ``solve_threshold`` leaves hidden keys out of its list where every weight is large enough: their weights are 0.
- ``solve_threshold`` takes four roundings off the least weight: the largest stay anyhow, and on which side another weight
  falls that equals it is up to rounding.
- ``gradient_row`` gives a row without weight the mean 0: no key of it has a gradient to be moved.
- ``add_statistics`` takes log W off log w: a constant, and what is added to all keys of a row is taken off by its mean.
- ``add_statistics`` takes the mean off what it adds: all normalizers but the sigmoid take off a mean of their own.
- ``rowwise_forward_chunk`` zeroes the output of an empty row: nothing has been added to it.
- Which rows keep a list, which their weights, and which tiles take a product backward: the same sums.
- ``describe`` of lists divides by the sum of their weights: it is 1 up to rounding, but for sigmoids, whose lists only the
  backward pass makes.
- ``weigh`` of sigmoids: what of a tie, and of a sum, is float64 is held by rows that are nearly one-hot alone.
- ``add_lines`` zeroes the row that makes an odd number even: nobody reads what comes of it.

"gradient of entmax15 is that of sparsemax", "logarithm: ..." and "inverse: ..." need a processor with AVX-512, and survive elsewhere.
"""

from __future__ import annotations

from tests.mutants.runner import Mutant

NATIVE = "backends/native/source"
SOLVE, ENTMAX_H, SUPPORT, SELECT, COMPRESS, NORMALIZE, STATE, PRODUCTS, LINES, FORWARD, JACOBIAN, BACKWARD = (
    f"{NATIVE}/{name}"
    for name in (
        "solve.h",
        "entmax.h",
        "candidates.h",
        "select.h",
        "compress.h",
        "normalize.cpp",
        "rows.h",
        "products.h",
        "score_lines.h",
        "rowwise_forward.h",
        "jacobian.h",
        "rowwise_backward.h",
    )
)
SIGMOID_H = f"{NATIVE}/sigmoid.h"
WEIGHTS_TESTS, ROWWISE_TESTS = "tests/backends/test_native_weights.py", "tests/backends/test_native_rowwise.py"


def weights(name: str) -> tuple[str, ...]:
    """A test on every normalizer; the library of each case is in its name, so that one alone cannot be named here."""
    return (f"{WEIGHTS_TESTS}::test_{name}",)


def rows(*cases: str) -> tuple[str, ...]:
    """As "case: normalizer"."""
    return tuple(f"{ROWWISE_TESTS}::test_rows_agree_with_dense_float64[{case.replace(': ', '-')}]" for case in cases)


def rows_test(name: str, *cases: str) -> tuple[str, ...]:
    return tuple(f"{ROWWISE_TESTS}::test_{name}[{case}]" for case in cases) or (f"{ROWWISE_TESTS}::test_{name}",)


def sigmoid(name: str) -> tuple[str, ...]:
    return (f"tests/backends/test_native_sigmoid.py::test_{name}",)


HOSTILE = weights("weights_agree_with_float64_on_hostile_rows")
EXACT = weights("no_weight_of_entmax_is_off_by_more_than_five_roundings_of_the_largest")
BORDER = weights("the_support_of_entmax_is_that_of_float64")
LARGE = weights("weights_of_rows_of_a_hundred_thousand")
GRADIENTS = weights("gradients_agree_with_differences_of_the_definition")
STEEP = ("tests/backends/test_steep_gradients.py",)
SHARE = weights("equal_keys_are_not_below_their_own_share")
FOUND = rows_test("what_the_solver_found_is_told")
ENDLESS = ("tests/hostile/test_infinite_keys.py",)
BAD = rows_test("bad_rows_are_told_and_touch_no_other")
SIGMOID = rows("plain: sigmoid--0.7")
MOVED = sigmoid("blocks_of_keys_may_lie_anywhere")
DECODED = (*MOVED, *rows("one row: sigmoid--0.7"))
ENTMAX = rows("plain: entmax-1.2", "plain: entmax-1.7")
SPARSEMAX = rows("plain: sparsemax-None")

MUTANTS = (
    # The solvers.
    Mutant("solve: alpha of 1 is not softmax", SOLVE, "if (rule.parameter == 1) rule.normalizer = SOFTMAX;", "", HOSTILE),
    Mutant("solve: a narrower window", SUPPORT, "splat(maximum), least = splat(-window);", "splat(maximum), least = splat(-0.5f * window);", HOSTILE),
    Mutant("solve: softmax has a window", SOLVE, "take_candidates(s, n, maximum, INFINITY, to);", "take_candidates(s, n, maximum, 4.0f, to);", HOSTILE),
    Mutant("solve: keys near the threshold are dropped", SOLVE, "drop_below(to, float((t - MARGIN) * scale));", "drop_below(to, float((t + 1e-3) * scale));", HOSTILE),
    Mutant("solve: no step in float64", SOLVE, "for (int round = 0; round < 50; round++) {\n        const double step = step_of<SQUARE>(sums_in_doubles", "for (int round = 0; round < 0; round++) {\n        const double step = step_of<SQUARE>(sums_in_doubles", HOSTILE),
    Mutant("solve: entmax15 without its half", SOLVE, "gap = SQUARE ? d * 0.5 - shift : d - shift;", "gap = d - shift;", HOSTILE),
    Mutant("solve: what a float takes off the threshold", SOLVE, "((SQUARE ? d * 0.5f : d) - high) - low;", "(SQUARE ? d * 0.5f : d) - high;", HOSTILE),
    Mutant("solve: entmax15 is not squared", SOLVE, "compress(in, SQUARE ? r * r : r, to.weight + count);", "compress(in, r, to.weight + count);", HOSTILE),
    Mutant("solve: entmax15 tells its threshold", SOLVE, "to.found = SQUARE ? t * t : -t;", "to.found = -t;", FOUND),
    Mutant("entmax: u is rounded", ENTMAX_H, "const Vec z = d * factor, lost = lost_of(d, splat(factor), z) + d * rest;", "const Vec z = d * factor, lost = {};", EXACT),
    Mutant("entmax: u has lost its rest", ENTMAX_H, "return {u, (z - (u - 1.0f)) + lost, below", "return {u, lost, below", HOSTILE),
    Mutant("entmax: keys at the maximum forgotten", ENTMAX_H, "sums.value += double(ties), sums.first += double(ties), sums.second += double(ties);", "", HOSTILE),
    Mutant("entmax: a wrong bound is believed", ENTMAX_H, "if (level == bound) return {NONE, from};", "if (level == bound) break;", HOSTILE),
    Mutant("entmax: few digits are enough", ENTMAX_H, "return fall(to, q, near, above, 1, WHOLLY, exact_sums);", "return {fall(to, q, near, above, 1, WHOLLY, rough_sums).level, fall(to, q, near, above, 1, NEARLY, exact_sums).from};", EXACT),
    Mutant("entmax: the bend to the other side", ENTMAX_H, "std::log1p(eta - bend * eta)", "std::log1p(eta + bend * eta)", EXACT),
    Mutant("entmax: the third sum has all its digits", ENTMAX_H, "(4 * bend * bend + 2e-3 * moved) * moved", "4 * bend * bend * moved", EXACT),
    Mutant("entmax: keys at the border in the derivatives", ENTMAX_H, "step.error = error + border < step.error ? error + border : step.error;", "step.error = error;", EXACT),
    Mutant("entmax: sums of long stretches", ENTMAX_H, "SHORT = 16 * LANES;", "SHORT = 1 << 20;", EXACT),
    Mutant("entmax: weights of before the last step", ENTMAX_H, "return weight + weight * (x + x * x * (x * third_ + second_));", "return weight;", EXACT),
    Mutant("entmax: the last step without its square", ENTMAX_H, "(x + x * x * (x * third_ + second_))", "x", EXACT),
    Mutant("entmax: no key is near the border", ENTMAX_H, "float(std::fabs(eta) * (32 / q))", "0", BORDER),
    Mutant("entmax: the last vector is not filled", SUPPORT, "store(of.distance + of.size + i, splat(OUTSIDE));", ";", HOSTILE),
    Mutant("entmax: places of dropped keys stay", SUPPORT, "if (more < LANES || count < j) {", "if (more < LANES) {", HOSTILE),
    Mutant("entmax: one step of Newton's", ENTMAX_H, "if (step.error <= enough) break;", "break;", HOSTILE),
    Mutant("entmax: keys are dropped too early", ENTMAX_H, "drop_below(to, -window_of(q, above));", "drop_below(to, -0.9f * window_of(q, above));", HOSTILE),
    Mutant("solve: a jump of steep alpha is not shared", ENTMAX_H, "(of_high <= 1 ? 1.0 : (1 - of_low) / (of_high - of_low));", "1.0;", HOSTILE),
    Mutant("solve: steep alpha ends early", ENTMAX_H, "round < 200 && of_low < 1", "round < 5 && of_low < 1", HOSTILE),
    Mutant("solve: one tie more than there is room for", SOLVE, "int64_t ties = k - count_above(s, n, last), count = 0;", "int64_t ties = k + 1 - count_above(s, n, last), count = 0;", HOSTILE),
    Mutant("solve: a vector of ties stays whole", SOLVE, "if (equal <= ties) {", "if (ties > 0) {", HOSTILE),
    Mutant("solve: ties of every vector anew", SOLVE, "count += more, ties -= equal;", "count += more;", HOSTILE),
    Mutant("solve: top-k tells the score", SOLVE, "to.found = double(last - maximum);", "to.found = double(last);", FOUND),
    Mutant("solve: the largest does not stay above min_weight", SOLVE, "below(hidden, v)) | at_least(e, one);", "below(hidden, v));", SHARE),
    Mutant("solve: min_weight of the largest, not of the sum", SOLVE, "splat(float(number * total * slack))", "splat(float(number * slack))", HOSTILE),
    Mutant("solve: threshold tells its sum", SOLVE, "to.found = std::log(total);", "to.found = total;", FOUND),
    Mutant("solve: threshold keeps the sum of all keys", SOLVE, "const float share = float(1 / sum_of(of.weight, of.size));", "const float share = 1;", HOSTILE),
    Mutant("solve: sigmoid without its bias", SOLVE, "x[i] = -bias - v[i];", "x[i] = -v[i];", HOSTILE),
    Mutant("solve: sigmoid of the other side", SOLVE, "inverse_of(1.0f + e[i])", "e[i] * inverse_of(1.0f + e[i])", HOSTILE),
    Mutant("solve: sigmoids that vanish have the least weight", SOLVE, "in[i] = at_least(highest, x[i]);", "in[i] = others(Mask{});", sigmoid("weights_that_vanish_are_0")),
    Mutant("solve: every list is a row's first keys", SOLVE, "list.place[list.size - 1] == list.size - 1;", "true;", rows("bool mask: sigmoid--0.7")),
    Mutant("logarithm: a sixteenth off", COMPRESS, "-0.0645385757f", "-0.0635385757f", SIGMOID),
    Mutant("logarithm: without its square", COMPRESS, "return whole + (r * r * q + r);", "return whole + r;", SIGMOID),
    Mutant("inverse: to four digits", COMPRESS, "return _mm512_fmadd_ps(near, lost, near);", "return near;", HOSTILE),
    Mutant("solve: what was in the row before", SOLVE, "std::memset(to + kept, 0, size_t(n - kept) * 4);", "", HOSTILE),
    Mutant("solve: softmax tells the first weight", SOLVE, "to.found = to.weight[j] > to.found ? to.weight[j] : to.found;", ";", FOUND),
    # Selection, lanes and sums.
    Mutant("select: negative floats in their bits' order", SELECT, "return bits >= 0 ? bits : -int64_t(bits & 0x7fffffff);", "return bits >= 0 ? bits : int64_t(bits);", HOSTILE),
    Mutant("select: those above the bounds forgotten", SELECT, "if (above + count_at_least(", "if (count_at_least(", HOSTILE),
    Mutant("select: nothing behind those that are kept", SELECT, "store(values + count, splat(-INFINITY));", "", HOSTILE),
    Mutant("select: groups give too high a bound", SELECT, "low = kth_of_few(spare, groups * LANES, k, -INFINITY, maximum, ROUGHLY);", "low = kth_of_few(spare, groups * LANES, k - k / 2, -INFINITY, maximum, ROUGHLY);", LARGE),
    Mutant("select: fifteen bits of the answer", SELECT, "EXACTLY = 64,", "EXACTLY = 15,", HOSTILE),
    Mutant("compress: whole vectors are not there", COMPRESS, "return store(to, from);", "return;", HOSTILE),
    Mutant("compress: places of whole vectors are not there", COMPRESS, "return store_places(to, from);", "return store_places(to, Ints{});", SIGMOID),
    Mutant("compress: last floats of a sum lost", COMPRESS, "rest += from[j];", ";", HOSTILE),
    Mutant("compress: last products of a sum lost", COMPRESS, "rest += double(a[j]) * b[j];", ";", rows("plain: topk-5.0")),
    Mutant("compress: a lane of doubles lost", COMPRESS, "(v[3] + v[7])", "v[3]", HOSTILE),
    Mutant("compress: log without its cubic term", COMPRESS, "p = p * f + 0.3333333134651184f;", "p = p * f;", HOSTILE),
    Mutant("compress: log without what rounding took", COMPRESS, " + more * shrink;", ";", HOSTILE),
    # Weights of rows of scores, and gradients.
    Mutant("normalize: a score that is not finite passes", NORMALIZE, "lane_max(larger(best[0], best[1])), good != n", "lane_max(larger(best[0], best[1])), false", HOSTILE),
    Mutant("normalize: half of the scores are looked at", NORMALIZE, "lane_max(larger(best[0], best[1]))", "lane_max(best[0])", HOSTILE),
    Mutant("normalize: alpha of the first row for all", NORMALIZE, "own.parameter = parameters[row];", "own.parameter = parameters[0];", weights("alpha_of_each_row")),
    Mutant("normalize: gradient of entmax15 is that of sparsemax", NORMALIZE, "return _mm512_sqrt_ps(w);", "return keep_where(in, splat(1.0f));", GRADIENTS),
    Mutant("normalize: gradient of entmax is w^alpha", NORMALIZE, "const Share share{rule.normalizer, 2 - rule.parameter};", "const Share share{rule.normalizer, rule.parameter};", GRADIENTS),
    Mutant("normalize: gradient not centred", NORMALIZE, "r * (load(g + j) - mean)", "r * load(g + j)", GRADIENTS),
    Mutant("normalize: steep gradient not centred", NORMALIZE, "* (g[j] - base - sum / share))", "* g[j])", GRADIENTS),
    Mutant("backward: steep gradients cancel", JACOBIAN, "if (list.size) base = g[steepest];", "", STEEP),
    Mutant("normalize: steep gradients cancel", NORMALIZE, "const double base = steepest < 0 ? 0 : g[steepest];", "const double base = 0;", STEEP),
    Mutant("normalize: steep gradients of hidden keys", NORMALIZE, "if (!(w[j] > 0)) continue;", "", weights("a_gradient_at_a_key_without_weight_is_not_met")),
    Mutant("normalize: gradients meet weights of 0", NORMALIZE, "sums += r == zero ? zero : r * above;", "sums += r * above;", weights("a_gradient_at_a_key_without_weight_is_not_met")),
    Mutant("normalize: a gradient of no weight is stored", NORMALIZE, "store(to + j, r == zero ? zero : r * (load(g + j) - mean));", "store(to + j, r * (load(g + j) - mean));", weights("a_gradient_at_a_key_without_weight_is_not_met")),
    Mutant("normalize: gradient of sigmoid without its rest", NORMALIZE, "store(to + j, x * (1.0f - x) * load(g + j));", "store(to + j, x * load(g + j));", GRADIENTS),
    Mutant("normalize: bad rows have gradients", NORMALIZE, "splat(1.0f)) + (w - w);  // NaN stays NaN", "splat(1.0f));", weights("gradients_of_empty_and_bad_rows")),
    # Attention.
    Mutant("rows: the maximum of the last block", LINES, "row.maximum = best > row.maximum ? best : row.maximum;", "row.maximum = best;", rows("padding: entmax15-None", "long: entmax15-None")),
    Mutant("rows: scores of bfloat16 lack their multiplier", PRODUCTS, "store(line, load(line) * factors_[tile + i]);", ";", rows("bfloat16: entmax15-None")),
    Mutant("rows: weights that are 0 are in the support", FORWARD, "sums.size += marked(below(Vec{}, w));", "sums.size += marked(in);", rows_test("a_weight_of_0_is_not_in_the_support")),
    Mutant("rows: mean of weights, not of shares", FORWARD, "sums.mean *= sums.share;", "", SIGMOID),
    Mutant("rows: keys behind the list are in it", FORWARD, "below(lane_numbers(), splat(float(end - j)))", "others(Mask{})", rows_test("what_stands_behind_a_list_counts_in_no_sum")),
    Mutant("rows: small weights beside a large one", FORWARD, "sums.peaked = sums.most > 0.25 * sums.total;", "", rows_test("a_row_that_is_nearly_one_hot_keeps_the_digits_of_what_is_left", "20.0-threshold-1e-12-None")),
    Mutant("rows: alpha or bias is NaN", FORWARD, "row.bad |= row.count > 0 && of.per_head && std::isnan(of.per_head[row.head]);", ";", rows_test("a_bias_or_alpha_that_is_nan_is_no_weight_of_0")),
    Mutant("normalize: alpha or bias is NaN", NORMALIZE, "if (seen.bad || std::isnan(rule.parameter)) {", "if (seen.bad) {", rows_test("a_bias_or_alpha_that_is_nan_is_no_weight_of_0")),
    Mutant("rows: last keys of the list lost", FORWARD, "if (j < end) with(j,", "if (false) with(j,", rows("plain: topk-5.0")),
    Mutant("rows: entropy without log W", FORWARD, "const double entropy = std::log(sums.total / sums.most) - ", "const double entropy = -", SPARSEMAX),
    Mutant("rows: variance about the maximum", FORWARD, "const Vec mean = splat(float(moments.mean)), top", "const Vec mean = splat(0.0f), top", SPARSEMAX),
    Mutant("rows: distance from the first key", FORWARD, "std::fabs(double(first_key + support.place[j] - row.position))", "std::fabs(double(first_key + support.place[j]))", SPARSEMAX),
    Mutant("rows: marks counted from the line", FORWARD, "sum += marks[first_key + of.place[j]] ?", "sum += marks[of.place[j]] ?", rows("window: topk-64.0")),
    Mutant("rows: the own key counted from the line", FORWARD, "if (own < end && *own == row.position - first_key)", "if (own < end && *own == row.position)", rows("window: topk-64.0")),
    Mutant("rows: spans not told", FORWARD, "columns[Column::SPAN] = share_of(span_of(call, batch));", ";", SPARSEMAX),
    Mutant("rows: bad rows are not told", STATE, "row.bad && columns_[i] != Column::VISIBLE_KEYS ? NAN :", "false ? NAN :", BAD),
    Mutant("rows: the output of a row with a score of -inf", FORWARD, "        if (row.bad)\n", "        if (row.poison)\n", ENDLESS),
    Mutant("rows: the output of a bad row", FORWARD, "for (int64_t e = 0; e < width; e++) line[e] = NAN;", ";", BAD),
    Mutant("rows: places of a list count from the line's place 0", FORWARD, "first = block - line.begin;", "first = block;", rows("window: entmax-1.2", "window: threshold-0.01", "window: sigmoid--0.7")),
    Mutant("rows: a list is met again in every block", FORWARD, "start = line.next,", "start = 0,", rows("long: entmax-1.2", "long: threshold-0.01")),
    Mutant("rows: a list ends with a piece", FORWARD, "while (j < size && place[j] < first + KEYS) {", "if (j < size && place[j] < first + KEYS) {", rows("long: entmax-1.2", "long: threshold-0.01")),
    Mutant("rows: lines of scores are weights", LINES, "const bool any = line.kept == Line::WEIGHTS && from < end;", "const bool any = from < end;", rows("long: entmax15-None", "padding: entmax-1.2", "nearly uniform: threshold-0.01", "ascending: entmax-1.7", "ascending: entmax-1.2")),
    Mutant("rows: every head has the first one's alpha", FORWARD, "per_head ? per_head[row.head] : 0.0", "per_head ? per_head[0] : 0.0", rows("plain: entmax-1.2")),
    # Sigmoids, by tiles and splits.
    Mutant("sigmoid: without its bias", SIGMOID_H, "own_[i].turned = -biases_[rows_[i].head];", "own_[i].turned = 0;", SIGMOID),
    Mutant("sigmoid: the bias of the first head", SIGMOID_H, "biases_[rows_[i].head]", "biases_[0]", SIGMOID),
    Mutant("sigmoid: of the other side", SIGMOID_H, "Vec x = turned - score;", "Vec x = score - turned;", SIGMOID),
    Mutant("sigmoid: what vanishes has the least weight", SIGMOID_H, "keep_where(keys.in[i], inverse)", "inverse", rows_test("a_weight_of_0_is_not_in_the_support", "sigmoid-0.0")),
    Mutant("sigmoid: no key is at the maximum", SIGMOID_H, "if ((WHAT & MOMENTS) && of.best[i] == row.maximum)", "if (false)", rows_test("a_row_that_is_nearly_one_hot_keeps_the_digits_of_what_is_left")),
    Mutant("sigmoid: one key at the maximum", SIGMOID_H, "double(sums[2]) * own.most", "own.most", sigmoid("keys_that_share_the_maximum_all_count")),
    Mutant("sigmoid: logarithms of the old maximum", SIGMOID_H, "own.logarithms += row.total * (double(own.top) - double(top));", "", MOVED),
    Mutant("sigmoid: the mean of the old maximum", SIGMOID_H, "row.first_moment += double(row.maximum) - double(maximum);", "", MOVED),
    Mutant("sigmoid: spread between blocks forgotten", SIGMOID_H, "spread + step * step * row.total * share;", "spread;", MOVED),
    Mutant("sigmoid: spread about the maximum", SIGMOID_H, "splat(float(mean)), top = splat(own.top)", "splat(0.0f), top = splat(own.top)", MOVED),
    Mutant("sigmoid: the mean of the last block", SIGMOID_H, "row.first_moment += step * share;", "row.first_moment = mean;", MOVED),
    Mutant("sigmoid: squares of small weights are no floats", SIGMOID_H, "own.most > 0 ? float(1 / own.most) : 0.0f", "1.0f", sigmoid("biases_at_the_end_of_what_exponentials_reach")),
    Mutant("sigmoid: sums of parts are not taken back", SIGMOID_H, "double around = more[0] * own.most;", "double around = more[0];", SIGMOID),
    Mutant("sigmoid: squares taken back once", SIGMOID_H, "more[2] * own.most * own.most", "more[2] * own.most", SIGMOID),
    Mutant("sigmoid: a mean beyond float32", SIGMOID_H, "mean = dot_of(s, distances, n);", ";", rows_test("distances_whose_sums_are_no_floats_are_summed_in_doubles", "mean")),
    Mutant("sigmoid: squares beyond float32", SIGMOID_H, "if (!(WHAT & NEAR) && !(around < INFINITY)) {", "if (false) {", rows_test("distances_whose_sums_are_no_floats_are_summed_in_doubles", "variance")),
    Mutant("sigmoid: every bias is tame", SIGMOID_H, "tame_ &= std::fabs(own_[i].turned) < TAME;", "", sigmoid("a_shortcut_for_near_scores_changes_no_bit")),
    Mutant("sigmoid: a bias is NaN", SIGMOID_H, "row.bad |= row.count > 0 && std::isnan(own.turned);", ";", rows_test("a_bias_or_alpha_that_is_nan_is_no_weight_of_0")),
    Mutant("sigmoid: splits of one maximum", SIGMOID_H, "raise(row, own, later.maximum), raise(later, its, row.maximum);", "", DECODED),
    Mutant("sigmoid: moments of the first split", SIGMOID_H, "join_moments(row, later.total, later.first_moment, later.second_moment);", "", DECODED),
    Mutant("sigmoid: logarithms of the first split", SIGMOID_H, "own.logarithms += its.logarithms, ", "", DECODED),
    Mutant("sigmoid: support of the first split", SIGMOID_H, ", own.size += its.size;", ";", DECODED),
    Mutant("sigmoid: mass is not told", SIGMOID_H, "columns[Column::MASS] = row.total, ", "", SIGMOID),
    Mutant("sigmoid: weights and not their shares", SIGMOID_H, "return std::fmin(sum * share, 1);", "return sum;", SIGMOID),
    Mutant("sigmoid: entropy without log W", SIGMOID_H, "std::log(row.total / own.most)", "0", SIGMOID),
    Mutant("sigmoid: concentration divided once", SIGMOID_H, "row.squares * share * share", "row.squares * share", SIGMOID),
    Mutant("sigmoid: distance of the row's first keys alone", SIGMOID_H, "row.total - before)", "0)", rows("causal: sigmoid--0.7", "window: sigmoid--0.7")),
    Mutant("sigmoid: distance from the first key", SIGMOID_H, "look.start - row.position, row.total", "look.start, row.total", SIGMOID),
    Mutant("sigmoid: the output of a bad row", SIGMOID_H, "return row.bad ? NAN : 1.0f;", "return 1.0f;", BAD),
    # Backward.
    Mutant("backward: mass without its gradient", JACOBIAN, "g[j] += of_mass;", ";", SIGMOID),
    Mutant("backward: statistics of sigmoids not centred", JACOBIAN, "g[j] += float((b[j] - middle) * sums.share);", "g[j] += float(b[j] * sums.share);", SIGMOID),
    Mutant("backward: concentration's gradient halved", JACOBIAN, "(2 * of_squares * share)", "(of_squares * share)", SPARSEMAX),
    Mutant("backward: mean without its gradient", JACOBIAN, "- d * of_depth + apart", "+ apart", SPARSEMAX),
    Mutant("backward: variance without its gradient", JACOBIAN, " + apart * apart * of_variance;", ";", SPARSEMAX),
    Mutant("backward: entropy without its gradient", JACOBIAN, "if (of_entropy != 0) sum -=", "if (false) sum -=", SPARSEMAX),
    Mutant("backward: first tokens without their gradient", JACOBIAN, "add_marked(first_tokens_of(call, batch), above.of[Column::FIRST_TOKENS]);", "", SPARSEMAX),
    Mutant("backward: spans without their gradient", JACOBIAN, "add_marked(span_of(call, batch), above.of[Column::SPAN]);", "", SPARSEMAX),
    Mutant("backward: the own key without its gradient", JACOBIAN, "b[j] += above.of[Column::OWN_KEY];", ";", SPARSEMAX),
    Mutant("backward: distance without its gradient", JACOBIAN, "b[j] += of_distance * ", "b[j] += 0 * ", SPARSEMAX),
    Mutant("backward: a short series", JACOBIAN, "for (int power = 16; power >= 2; power--)", "for (int power = 4; power >= 2; power--)", ENTMAX),
    Mutant("backward: gradient of sparsemax is softmax's", JACOBIAN, "case SPARSEMAX: store(r + j, splat(1.0f)); break;", "case SPARSEMAX: store(r + j, w); break;", SPARSEMAX),
    Mutant("backward: gradient of entmax is w^alpha", JACOBIAN, "const float power = float(2 - rule.parameter);", "const float power = float(rule.parameter);", ENTMAX),
    Mutant("backward: gradient not centred", JACOBIAN, "g[j] = float(r[j] * (g[j] - base - mean));", "g[j] = float(r[j] * g[j]);", SPARSEMAX),
    Mutant("backward: gradient of sigmoid without its rest", JACOBIAN, "store(g + j, w * (1.0f - w) * load(g + j));", "store(g + j, w * load(g + j));", SIGMOID),
    Mutant("backward: the bias of sigmoids has the last key's", JACOBIAN, "float(sum_of(gradient, list.size));", "gradient[list.size - 1];", SIGMOID),
    Mutant("backward: values of a list one too far", BACKWARD, "list.place[j + t < list.size ? j + t : j];", "list.place[j];", rows("long and sharp: sparsemax-None", "long: topk-5.0")),
    Mutant("backward: a bad row has gradients of scores", JACOBIAN, "for (int64_t j = 0; row.bad && j < list.size; j++) gradient[j] = NAN;", "", ENDLESS),
    Mutant("backward: a row of -inf has no gradients", BACKWARD, "if (any && s[j] == -INFINITY) continue;", "if (s[j] == -INFINITY) continue;", ENDLESS),
    Mutant("backward: a bad row has gradients", BACKWARD, "to.weight[to.size] = to.distance[to.size] = NAN;", "to.weight[to.size] = to.distance[to.size] = 0;", ENDLESS),
    Mutant("backward: gradient of the softcap dropped", BACKWARD, "gradient[j] *= softcap_gradients[list.place[j]];", ";", rows("bias of heads, softcap: entmax15-None")),
    Mutant("backward: the bias of the last row alone", BACKWARD, "to[(first_key + list.place[j]) * stride[3]] += gradient[j];", "to[(first_key + list.place[j]) * stride[3]] = gradient[j];", rows("bias of heads, softcap: entmax15-None")),
    Mutant("backward: query without the multiplier", BACKWARD, "call.grad_query[place * depth + d] = sum[d] * factor;", "call.grad_query[place * depth + d] = sum[d];", SPARSEMAX),
    Mutant("backward: keys without the multiplier", BACKWARD, "query[d] *= factor;", ";", SPARSEMAX),
    Mutant("backward: what the block before left", LINES, "if (!any || end - from < n) std::memset(to, 0, size_t(n) * 4);", "", rows("long: entmax-1.2", "nearly uniform: sparsemax-None", "window: entmax-1.2")),
    Mutant("backward: values of a product take scores", BACKWARD, "spread(list, list.weight, n, lines.line(i) + line.begin);", ";", rows("plain: sigmoid--0.7", "nearly uniform: entmax15-None")),
    Mutant("backward: large rows of a sparse tile are left out", BACKWARD, "if (dense[tile / ROWS] || much == 0) continue;", "continue;", rows("one wide row in twelve: sparsemax-None", "one wide row in twelve: entmax15-None")),
    Mutant("backward: rows of a sparse tile are met twice", BACKWARD, "desk, sums), lines.lines[i].kept = Line::NOTHING;", "desk, sums), backward_list(of, batch, group, lines, i, desk, sums);", rows("one wide row in twelve: sparsemax-None", "one wide row in twelve: entmax15-None")),
)  # fmt: skip
