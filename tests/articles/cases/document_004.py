"""Document 004: an analysis of softmax. Its second half is in document_004_tools.py."""

from __future__ import annotations

from tests.articles.case import Case, Document, Step, Text
from tests.articles.cases.document_004_tools import ADAPTIVE, ANALYSIS, ENTMAX, GRADIENT, KERNEL, MIXED, OPTIMISATION

ATTENTION = Case(
    name="004_softmax_attention",
    title=Text("`softmax`, `attention`", "`softmax`、`attention`"),
    verdict=Text("Right, but a row that sees nothing is NaN.", "是对的；但整行被 mask 遮住时，得到 NaN"),
    line="attention(q, k, v)",
    steps=(
        Step(
            Text(
                "It agrees with torch. A row of -inf gives NaN:",
                "与 torch 的结果一致。整行都是 -inf（query 什么都看不到）时得到 NaN。",
            ),
            """\
q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
output, weights = article.attention(q, k, v)
print(torch.allclose(output, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-6))
print(article.softmax(torch.full((3,), -math.inf)))
""",
        ),
    ),
    here=Step(
        Text(
            "It adds the entropy of every row. A row that sees nothing is 0.",
            "结果相同，还给出每一行的熵；什么都看不见的行是 0。",
        ),
        """\
result = attemper.attention(q, k, v, stats="all")
print(torch.allclose(result.output, output, atol=1e-6))
print(torch.allclose(result.stats.entropy, functional.entropy_of(weights), atol=1e-5))
print(functional.softmax(torch.full((3,), -math.inf)))
""",
    ),
)

COMPLEXITY = Case(
    name="004_complexity",
    title=Text("`standard_attention_complexity`", "`standard_attention_complexity`"),
    verdict=Text(
        "It fails on numbers and needs SymPy symbols. A multiply-add counts as one operation.",
        "传数字会报错，传 SymPy 符号才能计数；一次乘加只算一次运算",
    ),
    line="attemper lab complexity",
    steps=(
        Step(
            Text("Numbers have no `.subs`:", "`.subs` 是 SymPy 的方法，数字没有这个方法："),
            "article.standard_attention_complexity(512, 64)\n",
        ),
        Step(
            None,
            """\
import sympy

n, d = sympy.symbols("n d")
print(article.standard_attention_complexity(n, d)["ops_for_512_tokens"], 2 * 512**2 * 64 + 512**2)
""",
            "33816576 33816576",
        ),
    ),
    here=Step(
        Text(
            "It counts 2 per multiply-add and 6 per softmax entry, and measures time and memory. "
            "Its total, and the article's:",
            "它逐一计数：乘加算 2 次，softmax 每个元素算 6 次，还实测时间和内存。两边的总数：",
        ),
        """\
from attemper.lab.complexity import operations, usual_operations

print(operations(512, 64).total, usual_operations(512, 64))
""",
    ),
)

STABLE = Case(
    name="004_stable_softmax",
    title=Text("`numerically_stable_softmax`", "`numerically_stable_softmax`"),
    verdict=Text("Right. It is the first `softmax` again.", "是对的；它就是前面的 `softmax`"),
    line="softmax(scores)",
    steps=(
        Step(
            Text("It handles large scores:", "分数很大也没问题："),
            "scores = torch.tensor([1000.0, 1001.0, 1002.0])\nprint(article.numerically_stable_softmax(scores))\n",
        ),
    ),
    here=Step(Text("The same:", "结果相同："), "print(functional.softmax(scores))\n"),
)

SCALED = Case(
    name="004_scaled_softmax",
    title=Text("`scaled_softmax`", "`scaled_softmax`"),
    verdict=Text("Right for temperatures above 0, which it does not check.", "温度大于 0 时是对的，但它不检查温度"),
    line="softmax(scores, temperature=...)",
    builds_on=("004_softmax_attention",),
    steps=(
        Step(
            Text(
                "0 gives NaN, and a negative temperature favours the smallest score:",
                "小于 1 更尖锐，大于 1 更平滑。温度为 0 得到 NaN，为负则偏向最小的分数。",
            ),
            """\
scores = torch.tensor([1.0, 2.0, 3.0])
for temperature in (0.5, 2.0, 0.0, -1.0):
    print(temperature, article.scaled_softmax(scores, temperature))
""",
        ),
    ),
    here=Step(
        Text(
            "Infinity gives uniform weights; 0 and below raise an error.",
            "温度可以是无穷大（均匀分布）；0 和负数会报错。",
        ),
        """\
for temperature in (0.5, 2.0, math.inf, -1.0):
    print(temperature, functional.softmax(scores, temperature=temperature))
""",
    ),
)

TOP_K = Case(
    name="004_top_k_softmax",
    title=Text("`top_k_softmax`", "`top_k_softmax`"),
    verdict=Text("Right, but it fails if a row is shorter than k.", "是对的；但一行不足 k 个元素就报错"),
    line="topk_softmax(scores, k)",
    builds_on=("004_softmax_attention",),
    steps=(
        Step(
            Text(
                "Exactly k keys keep weight, even with ties:",
                "即使有并列，也恰好保留 k 个 key；可见的 key 不足 k 个，就全部保留。",
            ),
            """\
rows = torch.tensor([[3.0, 1.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, -math.inf, -math.inf, -math.inf]])
weights = article.top_k_softmax(rows, 2)
print(weights[0], (weights[1] > 0).sum(), weights[2])
""",
        ),
        Step(
            Text(
                "If k exceeds the number of keys, it fails:",
                "k 大于 key 的个数就报错，没有退回普通的 softmax：",
            ),
            "article.top_k_softmax(rows, 5)\n",
        ),
    ),
    here=Step(
        Text(
            "With ties, the lower index wins; k above the number of keys gives the plain softmax. "
            "In attention, pass `normalizer=attemper.nn.TopK(2)`.",
            "并列时下标小的优先；k 超过 key 数时就是普通 softmax。在注意力里传 `normalizer=attemper.nn.TopK(2)`。",
        ),
        """\
print(functional.topk_softmax(rows, 2))
print(torch.allclose(functional.topk_softmax(rows, 5), functional.softmax(rows)))
""",
    ),
)

DOCUMENT = Document(
    number="004",
    title=Text("an analysis of softmax", "Softmax 分析"),
    about=Text(
        'No snippet imports what it uses. Later snippets reuse the first `softmax`.',
        "所有片段都没有写 import。`softmax` 只定义一次，后面的片段直接使用。",
    ),
    cases=(
        ATTENTION, COMPLEXITY, STABLE, SCALED, TOP_K, KERNEL, ENTMAX, ANALYSIS, GRADIENT, OPTIMISATION, ADAPTIVE, MIXED,
    ),
)  # fmt: skip
