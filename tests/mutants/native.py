# ruff: noqa: E501 (the table quotes lines of source)
"""Mutants of the native kernels of softmax and of its readings, each with the tests that notice it.

Mutants of half.h need a processor with AVX512-BF16, and survive elsewhere; what is there for AMX only needs that, too.
Those of exp in simd.h need AVX-512; that of other processors has none here. Those of parts of a tile need AVX512-BF16
without AMX.
Not here because it changes no result, and why:

- ``finish`` gives an empty row the factor 0: its output is zeroed besides.
- ``masked_by`` takes the magnitude of visible keys alone: with that of the others a mask would go the general way.
- ``hide`` puts -inf in the place of a hidden score and does not add it: NaN, which stands there only in backward, has no
  weight either.
- ``HalfScores::sizes_of``: lengths decide whether scores are compared; weights that are denormal numbers without that are 0
  in products of bfloat16.
- ``Span::within`` asks for a begin of 0: where it is more, the last row's first key is, too.
- ``sum_head`` takes a share below 0 for the first bin: no entropy is below 0.
"""

from __future__ import annotations

from tests.mutants.runner import Mutant

TESTS = "tests/backends/test_native.py"
NATIVE = "backends/native/source"
(
    ROWS, SCORES, PACK, CONVERT, HALF, SIMD, CHUNKS, PRODUCTS, FORWARD, BACKWARD, DECODE, LIBRARY, POOL, SUMS, ENTROPIES,
    STATISTICS, MULTIPLY,
) = (
    f"{NATIVE}/{name}"
    for name in (
        "rows.h", "scores.h", "pack.h", "convert.h", "half.h", "simd.h", "chunks.h", "products.h", "forward.h",
        "backward.h", "decode.h", "library.cpp", "pool.cpp", "sums.cpp", "entropies.h", "statistics.h",
        "multiply.h",
    )
)  # fmt: skip
ORACLE = "test_native_agrees_with_the_oracle"


def oracle(*names: str) -> tuple[str, ...]:
    """Rows of the table of features, with few rows of queries and with many."""
    return tuple(f"{TESTS}::{ORACLE}[{name}]" for name in names)


def both(name: str) -> tuple[str, ...]:
    return oracle(name, f"tall: {name}")


PLAIN = both("plain")
RISING = oracle("blocks, ascending", "splits")
EXTREME = (f"{TESTS}::test_weights_in_backward_are_those_of_forward_however_large_scores_are",)
THREADS = (f"{TESTS}::test_results_are_bitwise_equal_over_threads_and_repeats",)
LAYOUTS = (f"{TESTS}::test_any_strides_equal_the_contiguous_copy",)
EXPONENTIALS = (f"{TESTS}::test_exponentials_have_every_digit_of_float32",)
NOT_A_KEY = (f"{TESTS}::test_a_hidden_key_that_is_not_a_number_makes_no_far_key_near",)
FAR = (
    f"{TESTS}::test_weights_too_small_for_a_float_are_0_however_they_are_found",
    f"{TESTS}::test_no_weight_is_a_denormal_number",
)
ONE_HOT = (f"{TESTS}::test_a_row_that_is_nearly_one_hot_keeps_the_digits_of_its_entropy",)
HALVES = oracle("tall: bfloat16", "blocks, bfloat16")
CALLERS = (f"{TESTS}::test_calls_from_several_threads_at_once_are_right",)
FORKED = (f"{TESTS}::test_a_forked_process_computes_too",)
OWN = both("causal")
MARKED = (f"{TESTS}::test_any_keys_may_be_first_tokens_or_in_a_span",)
OVERFLOW = (f"{TESTS}::test_scores_that_overflow_only_with_their_bias_are_told",)
HIDDEN = (f"{TESTS}::test_what_stands_at_a_hidden_key_reaches_nothing",)
BOUND = (f"{TESTS}::test_no_entropy_is_above_the_logarithm_of_its_count",)
BAD = (f"{TESTS}::test_a_score_that_is_not_finite_spoils_its_row_alone",)
NEAREST = ("tests/test_direct.py::test_the_largest_weight_is_the_float_that_is_nearest",)
FORMULAS = ("tests/test_direct.py::test_statistics_in_one_pass_are_those_of_the_formulas",)
COPIED = ("tests/test_direct.py::test_columns_that_are_statistics_are_copied_in_one_pass",)
REPEATED = ("tests/functional/test_known_requests.py::test_a_call_that_is_repeated_gives_the_same_bits",)
READINGS = "tests/monitor/test_native_sums.py::test_readings_are_those_of_the_statistics"


def sums(*cases: str) -> tuple[str, ...]:
    return tuple(f"{READINGS}[{case}]" for case in cases)


ROUNDED = ("tests/backends/test_native.py::test_an_output_of_sixteen_bits_is_rounded_to_the_nearest",)
"""By each library: where the processor rounds by an instruction of its own, the best one has no rounding to break."""

MUTANTS = (
    # Rows: the law of merging.
    Mutant("rows: total not moved", ROWS, "row.total *= shrink, row.first", "row.first", RISING),
    Mutant("rows: first tokens not moved", ROWS, "row.first *= shrink, row.distance", "row.distance", RISING),
    Mutant("rows: distance not moved", ROWS, "row.distance *= shrink, row.squares", "row.squares", RISING),
    Mutant("rows: the own key not moved", ROWS, "row.own *= shrink, row.span", "row.span", oracle("blocks, ascending window")),
    Mutant("rows: spans not moved", ROWS, "row.own *= shrink, row.span *= shrink;", "row.own *= shrink;", RISING),
    Mutant("rows: joined without the own key", ROWS, "row.own += other.own, row.span", "row.span", MARKED),
    Mutant("rows: joined without spans", ROWS, "row.own += other.own, row.span += other.span;", "row.own += other.own;", MARKED),
    Mutant("rows: joined without first tokens", ROWS, "row.first += other.first, row.distance", "row.distance", MARKED),
    Mutant("rows: joined without distances", ROWS, "row.distance += other.distance, row.own", "row.own", RISING),
    Mutant("rows: squares by one factor", ROWS, "row.squares *= shrink * shrink", "row.squares *= shrink", RISING),
    Mutant("rows: first moment not moved", ROWS, "row.first_moment = shrink * (row.first_moment + step * row.total)", "row.first_moment = shrink * row.first_moment", RISING),
    Mutant("rows: second moment without its cross term", ROWS, "step * (2 * row.first_moment + step * row.total)", "step * step * row.total", RISING),
    Mutant("rows: output not moved", ROWS, "return float(shrink);", "return 1.0f;", RISING),
    Mutant("rows: variance without the square of the mean", ROWS, "row.second_moment * inverse - mean * mean", "row.second_moment * inverse", PLAIN),
    Mutant("rows: concentration divided once", ROWS, "row.squares * inverse * inverse", "row.squares * inverse", PLAIN),
    Mutant("rows: mean with the wrong sign", ROWS, "mean == 0 ? 0.0 : -mean", "mean", PLAIN),
    Mutant("rows: window one key wider on the left", ROWS, "row.position - call.left > 0 ? row.position - call.left", "row.position - call.left > 1 ? row.position - call.left - 1", both("window")),
    Mutant("rows: causal sees one key more", ROWS, "row.position + call.right + 1", "row.position + call.right + 2", both("causal")),
    Mutant("rows: offset of the diagonal dropped", ROWS, ": query) + call.offset", ": query)", both("causal bottom-right")),
    Mutant("rows: no sink", ROWS, "return call.sink ?", "return false ?", both("sink")),
    Mutant("rows: the sink of head 0 for all", ROWS, "call.sink[row.head]", "call.sink[0]", both("sink")),
    Mutant("rows: keys at the maximum forgotten", ROWS, "sums.four += Quad{top, 0, 0,", "sums.four += Quad{0, 0, 0,", PLAIN),
    Mutant("rows: squares without those at the maximum", ROWS, "WHAT & SQUARES ? top : 0}", "0}", PLAIN),
    Mutant("rows: joined parts forget their count", ROWS, "row.count += other.count;", "", oracle("splits")),
    Mutant("rows: parts joined without moving the second", ROWS, "take = raise(other, row.maximum);", "take = 1.0f;", oracle("splits", "splits, padding")),
    # Scores.
    Mutant("scores: bool mask inverted", SCORES, "to[i] = from[i] ? 0.0f : -INFINITY;", "to[i] = from[i] ? -INFINITY : 0.0f;", both("mask per head")),
    Mutant("scores: broadcast bool mask inverted", SCORES, "to[i] = from[i * step] ? 0.0f : -INFINITY;", "to[i] = from[i * step] ? -INFINITY : 0.0f;", both("mask one key wide")),
    Mutant("scores: finfo.min is a bias", SCORES, "to[i] = to[i] <= lowest ?", "to[i] = false ?", both("bias")),
    Mutant("scores: softcap without its factor", SCORES, "x = t * c;", "x = t;", both("softcap")),
    Mutant("scores: gradient of the softcap is 1", SCORES, "1.0f - t * t", "one", both("softcap")),
    Mutant("scores: bias before the softcap dropped", SCORES, "x += b;", "", both("bias")),
    Mutant("scores: hidden keys not hidden", SCORES, "x = visible ? x : hidden;", "", both("causal")),
    Mutant("scores: one first token more", SCORES, "call.first_tokens < end ? call.first_tokens :", "call.first_tokens + 1 < end ? call.first_tokens + 1 :", both("three first tokens")),
    Mutant("rows: distance from the first key", FORWARD, "const int64_t distance = look.start - row.position;", "const int64_t distance = look.start;", PLAIN),
    Mutant("rows: distance without what lies before the block", ROWS, "+ away.rest * sums.four[0]", "", oracle("blocks, window", "splits")),
    Mutant("masks: every key is visible", SCORES, "count += visible ? one : Vec{};\n        most =", "count += one;\n        most =", oracle("splits, padding")),
    Mutant("masks: no bias is large", SCORES, "constexpr float SAFE_BIAS = 1e38f;", "constexpr float SAFE_BIAS = INFINITY;", OVERFLOW),
    Mutant("masks: products are safe up to the end", SCORES, "constexpr double SAFE_PRODUCT = 8e37;", "constexpr double SAFE_PRODUCT = INFINITY;", BAD),
    Mutant("masks: a bias that is not finite is taken for one", FORWARD, "if (mask.most < SAFE_BIAS) {", "if (true) {", BAD),
    Mutant("masks: a bias is none", SCORES, "int64_t(lane_sum(count)), largest(most)}", "int64_t(lane_sum(count)), 0.0f}", oracle("blocks, bias")),
    Mutant("masks: a bias where all is visible is none", FORWARD, "if (mask.visible < n || mask.most != 0)", "if (mask.visible < n)", oracle("blocks, bias")),
    Mutant("masks: a bool mask hides nothing", FORWARD, "if (mask.visible < n || mask.most != 0)", "if (mask.most != 0)", oracle("splits, padding", "mask per head")),
    Mutant("masks: what is hidden is added to -inf", SCORES, "x = visible ? x : hidden;", "x = visible ? x : x + hidden;", HIDDEN),
    Mutant("masks: a hidden score is bad", SCORES, "bad += (visible & ~(magnitude(x) < splat(INFINITY)))", "bad += ~(magnitude(x) < splat(INFINITY))", both("causal")),
    Mutant("masks: the highest is that of the products", SCORES, "best = larger(best, x);\n    }\n    return lane_max(best);", "best = larger(best, load(s + j) - b);\n    }\n    return lane_max(best);", oracle("blocks, bias")),
    Mutant("masks: told once for all rows", FORWARD, "last_ = place, low_ = low, told_ = false;", "last_ = place, low_ = low;", both("mask per head")),
    Mutant("masks: read once for all rows", FORWARD, "if (place != last_ || low != low_) {", "if (low != low_) {", both("mask per head")),
    Mutant("masks: read once for all blocks", FORWARD, "if (place != last_ || low != low_) {", "if (place != last_ && low != low_ && !told_) {", oracle("blocks, window, padding", "blocks, bias")),
    Mutant("masks: places after the last key are visible", FORWARD, "for (int64_t i = keys; i < KEYS; i++) buffer_[i] = -INFINITY;", "for (int64_t i = keys; i < KEYS; i++) buffer_[i] = 0;", both("mask per head")),
    Mutant("span: within though later keys are not seen", CHUNKS, "last_low <= low && first_high >= low + keys;", "last_low <= low;", both("right padding, causal")),
    Mutant("span: within though earlier keys are not seen", CHUNKS, "last_low <= low && first_high >= low + keys;", "first_high >= low + keys;", oracle("blocks, window, padding")),
    Mutant("span: whole though later keys are not seen", CHUNKS, "last_low <= low + begin && first_high >= low + end;", "last_low <= low + begin;", both("causal")),
    Mutant("span: all see keys up to a whole vector more", CHUNKS, "inner_end = (first_high < low + keys ? first_high - low : keys) / LANES * LANES;", "inner_end = up(first_high < low + keys ? first_high - low : keys, LANES);", both("causal")),
    Mutant("span: all see keys from a whole vector before", CHUNKS, "inner_begin = up(last_low > low ? last_low - low : 0, LANES);", "inner_begin = (last_low > low ? last_low - low : 0) / LANES * LANES;", oracle("blocks, window")),
    Mutant("span: the last visible key is lost", CHUNKS, "last = most < low + keys ? most - low : keys;", "last = most < low + keys ? most - low - 1 : keys;", oracle("blocks, window")),
    Mutant("products: the second half of a panel is the first", PRODUCTS, "if (p % PANEL) {", "if (false) {", oracle("blocks, window")),
    Mutant("products: half a panel has the first columns", PRODUCTS, "keys_ + (p - LANES) * call_.depth + LANES,", "keys_ + (p - LANES) * call_.depth,", oracle("blocks, window")),
    Mutant("products: weights from the first key, values from the panel", PRODUCTS, "*values = values_ + span.from * PANEL;", "*values = values_ + span.begin * PANEL;", oracle("blocks, window")),
    Mutant("extent: all rows see what the first sees", CHUNKS, "last_low = rows[i].low > last_low ? rows[i].low : last_low;", "", oracle("blocks, window")),
    Mutant("extent: no row sees more than the first", CHUNKS, "most = rows[i].high > most ? rows[i].high : most;", "", oracle("blocks, window")),
    Mutant("shape: keys before a row's first are counted", FORWARD, "(low > span.begin ? low : span.begin)", "span.begin", oracle("blocks, window")),
    Mutant("shape: keys before a row's first are seen", FORWARD, "(number >= first) & (number < end)", "(number < end)", oracle("blocks, window")),
    Mutant("shape: keys after a row's last are seen", FORWARD, "(number >= first) & (number < end)", "(number >= first)", both("causal")),
    Mutant("shape: keys after a row's last are counted", FORWARD, "(high < span.end ? high : span.end)", "span.end", both("causal")),
    Mutant("span: every block begins the output", CHUNKS, "first = least >= low;", "first = true;", oracle("blocks, window")),
    Mutant("rows: the last panel is left out", ROWS, "        take(j, next);\n", "", PLAIN),
    Mutant("weights: no key is far", FORWARD, "longest_key < NEAR_PRODUCT;", "longest_key < INFINITY;", FAR),
    Mutant("weights: keys are far on one side only", FORWARD, "2 * queries.longest * longest_key", "queries.longest * longest_key", FAR),
    Mutant("weights: keys of the blocks before are forgotten", FORWARD, "longest_key = longest_key > keys.longest ? longest_key : keys.longest;", "longest_key = keys.longest;", FAR),
    Mutant("weights: lengths are known after a key that is none", FORWARD, "if (!finite) longest_key = INFINITY;", "", NOT_A_KEY),
    Mutant("weights: hidden keys are near", FORWARD, "all_near && shape == Shape::NOTHING", "all_near", oracle("blocks, causal")),
    Mutant("weights: queries have no length", PRODUCTS, "longest = square > longest ? square : longest;", ";", FAR),
    Mutant("weights: keys have no length", PACK, "longest = larger(longest, squares[0] + squares[1]);", ";", FAR),
    Mutant("weights: every other number of a key has no length", PACK, "squares[i % 2] += x[i] * x[i];", "squares[0] = x[i] * x[i];", FAR),
    Mutant("rows: no key is at the maximum", FORWARD, "of.best[i] == row.maximum ? weigh<WHAT | TIES>", "false ? weigh<WHAT | TIES>", ONE_HOT),
    Mutant("simd: parts of a power of two are forgotten", SIMD, "_mm512_scalef_ps(root, n)", "_mm512_scalef_ps(splat(1.0f), n)", PLAIN),
    Mutant("simd: one root of two is off", SIMD, "{1.4142135f,", "{1.4152135f,", PLAIN),
    Mutant("outputs: all rows have the first one's share", FORWARD, "load(output + e) * share[i]", "load(output + e) * share[0]", PLAIN),
    Mutant("products: no half panel", PRODUCTS, "if (p < end) product<1, COUNT, 1>", "if (false) product<1, COUNT, 1>", oracle("blocks, window")),
    Mutant("products: the second part of a tile is the first", MULTIPLY, "with(std::integral_constant<int, COUNT / 2>(), COUNT / 2);", "with(std::integral_constant<int, COUNT / 2>(), 0);", oracle("tall: plain")),
    Mutant("products: outputs of the second part move as the first", MULTIPLY, "keep ? keep + first : nullptr", "keep", RISING),
    Mutant("products: an odd row is lost", MULTIPLY, "else if (rows <= COUNT) with", "else if (rows <= COUNT + 1) with", oracle("tall: plain")),
    Mutant("shape: a softcap is not seen", FORWARD, "if (!finite || call.softcap > 0) return Shape::ALL;", "if (!finite) return Shape::ALL;", oracle("blocks, softcap")),
    Mutant("shape: scores that are not finite are not seen", FORWARD, "if (!finite || call.softcap > 0) return Shape::ALL;", "if (call.softcap > 0) return Shape::ALL;", BAD),
    Mutant("shape: a mask is not seen", FORWARD, "if (call.mask.data) return span.within ? Shape::MASK : Shape::ALL;", "", oracle("splits, padding", "blocks, bias")),
    Mutant("shape: rows that see all count nothing", FORWARD, "row.count += n;", "", oracle("blocks and chunks")),
    Mutant("backward: a mask hides nothing", BACKWARD, "hide(s, bias, n);", "s[0] += 0;", oracle("blocks, padding with holes")),
    Mutant("first tokens: stops before the first that is marked", SCORES, "first + begin, 8); eight) break;", "first + begin, 8); !eight) break;", MARKED),
    Mutant("first tokens: stops before the last that is marked", SCORES, "first + end - 8, 8); eight) break;", "first + end - 8, 8); !eight) break;", MARKED),
    Mutant("first tokens: all between the first and the last", SCORES, "if (!first || first[key * call.first_keys_stride[1]]) sum", "sum", MARKED),
    Mutant("first tokens: those of the first batch", SCORES, "first = call.first_keys + batch * call.first_keys_stride[0];\n        if", "first = call.first_keys;\n        if", both("left padding")),
    Mutant("first tokens: of a block as if it were the first", SCORES, "sum += weights[key - start];", "sum += weights[key % KEYS];", MARKED),
    Mutant("spans: those of the first batch", SCORES, "call.span_keys + batch * step[0]", "call.span_keys", MARKED),
    Mutant("spans: of a block as if it were the first", SCORES, "start + i < call.keys && marks[start + i]", "start + i < call.keys && marks[i]", MARKED),
    Mutant("marks: first tokens of the first batch", SCORES, "call.first_keys + batch * step[0]", "call.first_keys", ("tests/backends/test_native_rowwise.py::test_rows_agree_with_dense_float64[marked first tokens-entmax15-None]",)),
    Mutant("rows: every visible score is -inf", ROWS, "if (row.poison || (row.bad && row.maximum == -INFINITY))", "if (row.poison)", ("tests/hostile/test_infinite_keys.py",)),
    Mutant("decode: values stand where keys stood", DECODE, "float* values = memory.floats(TOGETHER * wide);", "float* values = keys;", ("tests/backends/test_native_sigmoid.py::test_infinite_values_touch_no_score_of_a_later_block",)),
    Mutant("own key: the one before", FORWARD, "row.own += weights[row.position - start];", "row.own += weights[row.position - start - 1];", MARKED),
    # Packing and conversion.
    Mutant("pack: last keys of a panel lost", PACK, "else if (first + i < count) read_row", "else if (first + i + 1 < count) read_row", PLAIN),
    Mutant("pack: last value lost", PACK, "if (i < count) read_row(view, place + i", "if (i + 1 < count) read_row(view, place + i", PLAIN),
    Mutant("convert: float32 strides ignored", CONVERT, "else for (int64_t i = 0; i < n; i++) to[i] = from[i * step];\n            return;\n        }\n        case BFLOAT16", "else for (int64_t i = 0; i < n; i++) to[i] = from[i];\n            return;\n        }\n        case BFLOAT16", LAYOUTS),
    Mutant("convert: bfloat16 cut off, not rounded", CONVERT, "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16", "bits >> 16", ROUNDED),
    # Products of bfloat16.
    Mutant("half: scores lack their multiplier", FORWARD, "known = scale_row(s, n, tile.factors[i]);", "known = highest(s, n);", HALVES),
    Mutant("half: outputs not moved to a new maximum", PRODUCTS, "if (keep[i] == 1.0f) continue;", "continue;", HALVES),
    Mutant("half: last keys of a panel lost", HALF, "            if (first + i < count)\n", "            if (first + i + 1 < count)\n", HALVES),
    Mutant("half: last value lost", HALF, "if (i + t < count) lines[t]", "if (i + t + 1 < count) lines[t]", HALVES),
    Mutant("half: values of a pair exchanged", HALF, "{\n            const __m512i a = _mm512_loadu_si512(lines[0] + e), b = _mm512_loadu_si512(lines[1] + e);", "{\n            const __m512i a = _mm512_loadu_si512(lines[1] + e), b = _mm512_loadu_si512(lines[0] + e);", HALVES),
    Mutant("half: backward's scores lack their multiplier", BACKWARD, "if (!factors) return;", "return;", HALVES),
    Mutant("half: backward takes other scores than forward", BACKWARD, "halves = takes_halves(call), ", "halves = false, ", EXTREME),
    Mutant("decode: a quarter of the keys lost", DECODE, "const int64_t quarter = n / TOGETHER;", "const int64_t quarter = n / TOGETHER - 1;", oracle("splits")),
    # Functions.
    Mutant("simd: exp without its square", SIMD, "p[i] = of[i].rest * 0.500004888f + 1.00001466f;", "p[i] = splat(1.0f);", PLAIN),
    Mutant("simd: exp as the series has it", SIMD, "1.00001466f", "1.0f", EXPONENTIALS),
    Mutant("simd: tanh without its cubic term", SIMD, "q = q * s + -0.3333328068256378f;", "q = q * s;", both("softcap")),
    # Backward.
    Mutant("backward: D dropped", BACKWARD, "terms.dot = settled ? 0.0f : dot;", "terms.dot = 0.0f;", PLAIN),
    Mutant("backward: sink leaves dP alone", BACKWARD, "terms.output = settled ? 0.0f : terms.mass;", "terms.output = settled ? 0.0f : 1.0f;", both("sink")),
    Mutant("backward: a settled row has its noise", BACKWARD, "const bool settled = z == 0 && terms.mass == 1;", "const bool settled = false;", EXTREME),
    Mutant("backward: variance without its linear term", BACKWARD, "(x * terms.variance + (2 * terms.variance - terms.depth))", "(x * terms.variance - terms.depth)", PLAIN),
    Mutant("backward: concentration without its gradient", BACKWARD, "+ p * terms.squares;", ";", PLAIN),
    Mutant("backward: first tokens without their gradient", BACKWARD, "if (first[key]) gradient[key - begin] += terms.first;", "", PLAIN),
    Mutant("backward: spans without their gradient", BACKWARD, "if (span[key]) gradient[key - begin] += terms.span;", "", PLAIN),
    Mutant("backward: the own key without its gradient", BACKWARD, "gradient[row.position - begin] += terms.own;", ";", OWN),
    Mutant("backward: the own key without its mean", BACKWARD, "terms.own * value[Column::OWN_KEY] - ", "", OWN),
    Mutant("backward: spans without their mean", BACKWARD, " - terms.span * value[Column::SPAN] -", " -", PLAIN),
    Mutant("backward: distance without its gradient", BACKWARD, "if (terms.distance != 0) ds += magnitude(number) * terms.distance;", "", PLAIN),
    Mutant("backward: nothing falls on the maximum", BACKWARD, "gradient[top - begin] += terms.top;", ";", PLAIN),
    Mutant("backward: a tile that sees no key keeps what stood there", BACKWARD, "const int64_t begin = part.begin < part.end ? part.begin : whole.end;", "const int64_t begin = part.begin < part.end ? part.begin : whole.begin;", oracle("blocks, windows of two heads")),
    Mutant("backward: keys behind those of a tile keep what stood there", BACKWARD, "std::memset(line + end, 0, size_t(whole.end - end) * 4);", "", oracle("blocks, causal")),
    Mutant("backward: keys before those of a tile keep what stood there", BACKWARD, "std::memset(line + whole.begin, 0, size_t(begin - whole.begin) * 4);", "", oracle("blocks, window")),
    Mutant("backward: sums of keys lack the first tile that sees them", BACKWARD, "(ends[low / ROWS] <= from ||", "(ends[low / ROWS] < until ||", oracle("blocks, causal")),
    Mutant("backward: sums of keys lack the last tile that sees them", BACKWARD, "|| begins[high / ROWS - 1] >= until)) high", "|| begins[high / ROWS - 1] >= from)) high", oracle("blocks, window")),
    Mutant("backward: the last rows of a sweep are another's", BACKWARD, "return Depth{low, high < real ? high : real};", "return Depth{low, high - ROWS};", oracle("blocks, window")),
    Mutant("backward: gradient of the softcap dropped", BACKWARD, "store(ds + j, load(ds + j) * load(desk.softcap + j));", ";", both("softcap")),
    Mutant("backward: query without the multiplier", BACKWARD, "sum[d] * desk.factor[i]", "sum[d]", PLAIN),
    Mutant("backward: sink logit has the wrong sign", BACKWARD, "(desk.terms[i].mass - 1) * desk.terms[i].dot", "(1 - desk.terms[i].mass) * desk.terms[i].dot", both("sink")),
    Mutant("backward: shares not added up", BACKWARD, "for (int64_t share = 1; share < work.shares; share++)", "for (int64_t share = 1; share < 1; share++)", oracle("blocks, window")),
    # Statistics.
    Mutant("entropies: may be above log n by a rounding", ENTROPIES, "return {double(nearest) > exact ? std::nextafter(nearest, 0.0f) : nearest, nearest};", "return {nearest, nearest};", BOUND),
    Mutant("entropies: not bounded", ENTROPIES, "return at_most(z + a, log_n);", "return z + a;", BOUND),
    Mutant("entropies: NaN is bounded", ENTROPIES, "return value > bound ? bound : value;", "return value < bound ? value : bound;", BAD),
    Mutant("entropies: one key's share is of log 1", ENTROPIES, "entropy / (n > 1 ? log_n : least)", "entropy / log_n", BOUND),
    Mutant("entropies: the logarithm of the count before", ENTROPIES, "if (found.down < 0) found = computed(double(n));", "if (found.down < 0) found = computed(double(n - 1));", BOUND),
    Mutant("statistics: a copied column is another", STATISTICS, "{Statistics::SELF_WEIGHT, Column::OWN_KEY}", "{Statistics::SELF_WEIGHT, Column::DISTANCE}", COPIED),
    Mutant("statistics: the last row's column is left out", STATISTICS, "columns[column], size_t(rows) * 4", "columns[column], size_t(rows - 1) * 4", COPIED),
    Mutant("statistics: an empty row's mean is -inf", STATISTICS, "(n[i] > 0 ? m[i] : 0.0f) - a[i]", "m[i] - a[i]", FORMULAS),
    Mutant("statistics: an empty row has a largest weight", STATISTICS, "to[i] = n[i] > 0 ? to[i] : 0.0f;", "to[i] = to[i];", FORMULAS),
    Mutant("statistics: counts of the first rows for all", STATISTICS, "log_n.take(n + first, count);", "log_n.take(n, count);", FORMULAS),
    Mutant("statistics: an empty row has effective tokens", STATISTICS, "n[i] > 0 ? 1.0f / c[i] : 0.0f", "1.0f / c[i]", FORMULAS),
    Mutant("statistics: the largest weights of the last rows are left out", STATISTICS, "std::memcpy(to + i, &found, size_t(rows - i) * 4);", "", NEAREST),
    Mutant("statistics: exp without a digit", STATISTICS, "p = p * r + 1.0 / 5040;", "p = p * r;", NEAREST),
    Mutant("statistics: derived at the first rows' places", STATISTICS, "value = value ? value + place : nullptr;", "value = value;", REPEATED),
    Mutant("statistics: counted at the first rows' places", STATISTICS, "if (to.counts) from_here.counts += place;", "", REPEATED),
    Mutant("statistics: derived from the first rows' state", STATISTICS, "call.state + call.place[column] * plane + place;", "call.state + call.place[column] * plane;", REPEATED),
    Mutant("statistics: of the first row of a tile", FORWARD, "derive(call, row_place, count);", "derive(call, row_place, 1);", REPEATED),
    Mutant("statistics: of the first of few rows", DECODE, "derive(call, row_place, work.rows);", "derive(call, row_place, 1);", REPEATED),
    Mutant("statistics: not those of a repeated call", LIBRARY, "now.statistics = again->statistics;", "", REPEATED),
    Mutant("again: the keys of the first call", LIBRARY, "now.key.data = again->key, ", "", REPEATED),
    Mutant("again: the values of the first call", LIBRARY, "now.value.data = again->value;", "", REPEATED),
    Mutant("rows: the state of one column for all", ROWS, "planes_[asked_++] = call.state + call.place[column] * size;", "planes_[asked_++] = call.state;", PLAIN),
    Mutant("rows: a full buffer is not written", ROWS, "if (count_ == ROOM) flush();", "if (count_ == ROOM) count_ = 0;", oracle("blocks and chunks")),
    Mutant("rows: what was written before is written over", ROWS, "place_ += count_, count_ = 0;", "count_ = 0;", oracle("blocks and chunks")),
    Mutant("statistics: a row that is not finite has mass", STATISTICS, "lse - lse + 1.0f", "1.0f", BAD),
    Mutant("statistics: an empty row has mass", STATISTICS, "n[i] > 0 ? lse - lse + 1.0f : 0.0f", "lse - lse + 1.0f", FORMULAS),
    Mutant("sums: empty rows are not counted", SUMS, "sum[EMPTY]++;", ";", sums("few-all")),
    Mutant("sums: rows that are not finite are valid", SUMS, "if (!std::isfinite(lse)) {", "if (false) {", sums("spoiled-all")),
    Mutant("sums: rows that are left out in the first batch", SUMS, "included += batch * call.included_stride[0] + ", "included += ", sums("plain-real")),
    Mutant("sums: rows that are left out of the first head", SUMS, " + head * call.included_stride[1];", ";", sums("plain-each")),
    Mutant("sums: every row counts", SUMS, "if (included && !included[i * call.included_stride[2]]) continue;", "", sums("plain-real")),
    Mutant("sums: a head's rows of the first batch", SUMS, "(batch * call.heads + head) * call.rows", "head * call.rows", sums("plain-all")),
    Mutant("sums: the last maximum", SUMS, "m > sum[MAX_LOGIT] ? m : sum[MAX_LOGIT]", "m", sums("plain-all")),
    Mutant("sums: no maximum below 0", SUMS, "sum[MAX_LOGIT] = -INFINITY;", "sum[MAX_LOGIT] = 0;", sums("below 0-all")),
    Mutant("sums: one key has a normalised entropy", SUMS, "if (n > 1) {", "if (n > 0) {", sums("causal-all")),
    Mutant("sums: an entropy of log n is beyond the last bin", SUMS, "place < BINS ? place : BINS - 1", "place", sums("some flat-all")),
    Mutant("sums: one bin of 32 lost", SUMS, "int64_t(share * BINS)", "int64_t(share * (BINS - 1))", sums("plain-all")),
    Mutant("sums: twice as many visible keys", SUMS, "= std::ilogb(n);", "= std::ilogb(n) + 1;", sums("plain-all")),
    Mutant("sums: first tokens of rows that see no more", SUMS, "if (n > float(call.first_tokens)) {", "if (n >= float(call.first_tokens)) {", sums("three first tokens-all")),
    Mutant("sums: a first token for all", SUMS, "sum[FIRST_TOKEN_MASS] += share,", "sum[FIRST_TOKEN_MASS] += 1,", sums("plain-all")),
    # The interface.
    Mutant("library: few rows keep the state of decode", LIBRARY, "<= FEW ? backward_of_few(*call) : backward_by_tiles(*call)", "<= 0 ? backward_of_few(*call) : backward_by_tiles(*call)", EXTREME),
    Mutant("library: a mask's gradient summed by every head", LIBRARY, "work.by_group = call.heads == 1 || call.grad_mask_stride[1] != 0;", "work.by_group = true;", THREADS),
    Mutant("pool: the last task of a share is lost", POOL, "share[i].end = tasks * (i + 1) / shares;", "share[i].end = tasks * (i + 1) / shares - (i + 1 == shares);", both("causal")),
    Mutant("pool: nobody takes from another's share", POOL, "for (int64_t i = 0; i < shares; i++) {\n            Share& from", "for (int64_t i = 0; i < 1; i++) {\n            Share& from", CALLERS),
    Mutant("pool: a forked child keeps the parent's pool", POOL, "pthread_atfork(nullptr, nullptr, forget);", "", FORKED),
)  # fmt: skip
