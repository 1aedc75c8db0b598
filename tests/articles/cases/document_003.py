"""Document 003: variance normalisation by d_k. It prints numbers, no code."""

from __future__ import annotations

from tests.articles.case import Case, Document, Step, Text

RANGES = Case(
    name="003_ranges",
    title=Text("variances and 3 sigma ranges, d = 64", "d = 64 时的方差与 3σ 范围"),
    verdict=Text(
        "24 and 3 are right. 0.9375 should be 0.375, 3.8e-5 should be 3.8e-6, and 0.0058 should be 0.0059.",
        "24 和 3 是对的；0.9375 应为 0.375，3.8e-5 应为 3.8e-6，0.0058 应为 0.0059",
    ),
    line="attemper lab scaling",
    snippet=False,
    steps=(
        Step(
            None,
            """\
for divisor in (1, 8, 64, 64**2):
    variance = 64 / divisor**2
    print(f"{divisor}: variance {variance:.3g}, three sigma {3 * math.sqrt(variance):.3g}")
""",
            """\
1: variance 64, three sigma 24
8: variance 1, three sigma 3
64: variance 0.0156, three sigma 0.375
4096: variance 3.81e-06, three sigma 0.00586""",
        ),
    ),
    here=Step(
        Text("The command in Python:", "命令 `attemper lab scaling`，在 Python 里这样调用："),
        """\
from attemper import lab

for row in lab.run("scaling").table("three standard deviations, d = 64").rows:
    print(row)
""",
    ),
)

WEIGHTS = Case(
    name="003_weights",
    title=Text("[12, 8, 10] divided in four ways, d = 16", "[12, 8, 10] 的四种缩放，d = 16"),
    verdict=Text(
        "All four rows are right. The scores have variance 4, not 16.", "四行都对；但这组分数的方差是 4，不是 16"
    ),
    line="softmax(scores, temperature=...)",
    snippet=False,
    steps=(
        Step(
            Text('The text says "in keeping with variance 16":', "文中说“符合方差 = 16”，实际是 4："),
            "print(torch.tensor([12.0, 8.0, 10.0]).var())\n",
        ),
    ),
    here=Step(
        Text("The four rows, as printed:", "四行权重，与文中一致："),
        """\
scores = torch.tensor([12.0, 8.0, 10.0], dtype=torch.float64)
for divisor in (1, 4, 16, 256):
    weights = functional.softmax(scores, temperature=divisor)
    print(divisor, [round(weight, 3) for weight in weights.tolist()])
""",
    ),
)

DOCUMENT = Document(
    number="003",
    title=Text("variance normalisation by d_k", "除以 d_k 的方差归一化"),
    about=Text(
        "A derivation, three ranges and a table of weights, without code.",
        "没有代码：一段推导、三个范围和一张权重表。",
    ),
    cases=(RANGES, WEIGHTS),
)
