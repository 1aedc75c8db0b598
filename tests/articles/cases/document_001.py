"""Document 001: why scores are scaled."""

from __future__ import annotations

from tests.articles.case import Case, Document, Step, Text

SOFTMAX = Case(
    name="001_softmax",
    title=Text("`Softmax([10, 20, 30])`", "`Softmax([10, 20, 30])`"),
    verdict=Text("A formula, not code. It is true to four digits.", "这是公式，不是代码；四位小数以内是对的"),
    line="softmax(scores)",
    steps=(),
    here=Step(
        Text("The two zeros, with more digits:", "把那两个 0 写得更精确些："),
        "print(functional.softmax(torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)))\n",
    ),
)

SCALED = Case(
    name="001_scaled_scores",
    title=Text("`scaled_scores = scores / sqrt(d_k)`", "`scaled_scores = scores / sqrt(d_k)`"),
    verdict=Text("Right, once you define its names.", "给出变量和 sqrt 之后，是对的"),
    line="attention(q, k, v)",
    inputs="import torch\nq, k = torch.randn(2, 1, 1, 1000, 64).unbind()\nscores, d_k = q @ k.mT, 64\n",
    steps=(
        Step(
            Text("The variance of a million scores, before and after:", "一百万个分数，缩放前后的方差："),
            'print(f"{article.scores.var().item():.1f} -> {article.scaled_scores.var().item():.2f}")\n',
        ),
    ),
    here=Step(
        Text(
            "`attention` scales by itself. For scores that you have, pass a temperature:",
            "`attention` 自己会除以头大小的平方根。如果手里已经是分数，传入温度即可：",
        ),
        """\
weights = functional.softmax(article.scores, temperature=math.sqrt(article.d_k))
print(torch.allclose(weights, torch.softmax(article.scaled_scores, dim=-1), atol=1e-6))
entropy = attemper.attention(article.q, article.k, article.k, stats=("entropy",)).stats.entropy
print(torch.allclose(entropy, functional.entropy_of(weights), atol=1e-5))
""",
    ),
)

TABLE = Case(
    name="001_table",
    title=Text("the table for d = 2, 4, 512, 1024", "d = 2、4、512、1024 的表格"),
    verdict=Text(
        "The variances are right. The range is two standard deviations, 2 sqrt(d), and 45.2 should be 45.3.",
        "方差是对的；范围其实是 ±2 个标准差，即 2 sqrt(d)，45.2 应为 45.3",
    ),
    line="attemper lab scaling",
    snippet=False,
    steps=(
        Step(
            None,
            """\
for d in (2, 4, 512, 1024):
    print(d, round(2 * math.sqrt(d), 4))
""",
            """\
2 2.8284
4 4.0
512 45.2548
1024 64.0""",
        ),
    ),
    here=Step(
        Text(
            "In Python; it also samples the variances:",
            "在 Python 里这样运行，它还会抽样核对方差：",
        ),
        """\
from attemper import lab

scaling = lab.run("scaling")
print(scaling.table("where 95% of the scores lie").rows[-2:])
""",
    ),
)

SIMPLE = Case(
    name="001_simple",
    title=Text("the simple example", "简单例子"),
    verdict=Text("It prints exactly what the article says.", "输出与文章逐位一致"),
    line="softmax(scores, temperature=32)",
    steps=(),
    here=Step(
        Text("Temperature 32 is the same division:", "温度 32 就是同样的除法："),
        """\
score = torch.tensor([100.0, 120.0, 150.0])
print(functional.softmax(score), functional.softmax(score, temperature=32))
print(functional.entropy(score), functional.entropy(score, temperature=32))
""",
    ),
)

FULL = Case(
    name="001_full",
    title=Text("the full example", "完整例子"),
    verdict=Text(
        "It prints what the article says. Its scaled gradient is 32 times too small to compare.",
        "输出与文章一致；但“缩放后的梯度”只有应有值的 1/32，不能直接比较",
    ),
    line="softmax_jacobian(scores)",
    steps=(
        Step(
            Text(
                "Both gradients are for the *unscaled* scores. For the scores of the softmax, the "
                "second is 32 times larger:",
                "两个梯度都是对*未缩放*分数求的。如果对 softmax 实际看到的分数求，第二个是它的 32 倍：",
            ),
            """\
scaled = (torch.tensor([100.0, 120.0, 150.0]) / 32).requires_grad_()
torch.softmax(scaled, dim=0)[0].backward()
print(article.grad_scaled, scaled.grad, scaled.grad / article.grad_scaled)
""",
        ),
    ),
    here=Step(
        Text(
            "The first row of the Jacobian, for the unscaled and the scaled scores:",
            "雅可比矩阵的第一行，先是对未缩放的分数，再是对缩放后的分数：",
        ),
        """\
score = torch.tensor([100.0, 120.0, 150.0])
print(functional.softmax_jacobian(score, temperature=32)[0], functional.softmax_jacobian(score / 32)[0])
""",
    ),
)

DOCUMENT = Document(
    number="001",
    title=Text("why scores are scaled", "为什么缩放注意力分数"),
    about=Text(
        "The longer examples stand on one line; their two results are stored with the snippets.",
        "较长的例子在原文里挤成了一行。两处打印结果与片段放在一起。",
    ),
    cases=(SOFTMAX, SCALED, TABLE, SIMPLE, FULL),
)
