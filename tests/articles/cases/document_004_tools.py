"""Document 004, its second half: kernels, entmax, tools of analysis, practice."""

from __future__ import annotations

from tests.articles.case import Case, Step, Text

KERNEL = Case(
    name="004_kernel_attention",
    title=Text("`kernel_attention`", "`kernel_attention`"),
    verdict=Text(
        "Right for one head. It fails on [B, H, Q, D] and is not causal.",
        "单头是对的；[B, H, Q, D] 的输入会报错；不支持因果",
    ),
    line="linear_attention(q, k, v)",
    steps=(
        Step(
            Text(
                "On [batch, length, size], it agrees with explicit weights:",
                "输入为 [batch, length, size] 时，与显式写出权重（elu + 1）的结果一致：",
            ),
            """\
q, k, v = torch.randn(3, 2, 6, 8).unbind()
features = [torch.nn.functional.elu(x) + 1 for x in (q, k)]
weights = features[0] @ features[1].mT
expected = weights / weights.sum(-1, keepdim=True) @ v
print(torch.allclose(article.kernel_attention(q, k, v), expected, atol=1e-5))
""",
        ),
        Step(
            None,
            "article.kernel_attention(*torch.randn(3, 2, 4, 6, 8).unbind())\n",
            "RuntimeError: batch1 must be a 3D tensor",
        ),
    ),
    here=Step(
        Text(
            "With or without heads, causal or not: see [linear-attention.md](../linear-attention.md).",
            "有没有头、是否因果都行，见 [linear-attention.md](../linear-attention.md)（英文）。",
        ),
        """\
print(torch.allclose(functional.linear_attention(q, k, v).output, expected, atol=1e-6))
heads = torch.randn(3, 2, 4, 6, 8).unbind()
print(functional.linear_attention(*heads, feature_map="elu", is_causal=True).output.shape)
""",
    ),
)

ENTMAX = Case(
    name="004_entmax15",
    title=Text("`entmax15`", "`entmax15`"),
    verdict=Text(
        "Its threshold function does not exist. With the paper's tau, weights do not sum to 1; with 2 tau it is right.",
        "没有给出阈值函数；论文算法返回 tau，代进去权重之和不是 1，返回 2 tau 才对",
    ),
    line="entmax15(scores)",
    steps=(
        Step(
            Text(
                "The article never defines the function. The source is Peters, Niculae and Martins 2019:",
                "文中从未给出这个辅助函数。出处应为 Peters、Niculae 和 Martins 2019：",
            ),
            "scores = torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64)\narticle.entmax15(scores)\n",
        ),
        Step(
            None,
            """\
low, high = scores.max() / 2 - 1, scores.max() / 2
for _ in range(60):
    tau = (low + high) / 2
    low, high = (tau, high) if (scores / 2 - tau).clamp(min=0).square().sum() > 1 else (low, tau)
print("entmax", (scores / 2 - tau).clamp(min=0).square())
for name, threshold in (("2 tau", 2 * tau), ("tau", tau)):
    article.threshold_and_support_for_entmax15 = lambda x, dim, threshold=threshold: threshold
    print(name, article.entmax15(scores), article.entmax15(scores).sum())
""",
            """\
entmax tensor([0.6740, 0.3260, 0.0000], dtype=torch.float64)
2 tau tensor([0.6740, 0.3260, 0.0000], dtype=torch.float64) tensor(1.0000, dtype=torch.float64)
tau tensor([0.4362, 0.1685, 0.0000], dtype=torch.float64) tensor(0.6047, dtype=torch.float64)""",
        ),
    ),
    here=Step(
        Text(
            '`entmax(scores, alpha)` takes any alpha above 1. In attention, pass `normalizer="entmax15"`.',
            '阈值和梯度都精确。`entmax(scores, alpha)` 接受任何大于 1 的 alpha；在注意力里传 `normalizer="entmax15"`。',
        ),
        """\
print(functional.entmax15(scores), functional.entmax(scores, 1.5))
""",
    ),
)

ANALYSIS = Case(
    name="004_analyze_distribution",
    title=Text("`analyze_attention_distribution`", "`analyze_attention_distribution`"),
    verdict=Text("Right, but its Gini coefficient has the wrong sign.", "其余都对，但基尼系数的符号反了"),
    line="entropy_of, gini, max_weight, effective_tokens",
    steps=(
        Step(
            Text(
                "It sorts in descending order, the formula needs ascending: one-hot weights (second) give -3/4:",
                "公式要求升序，代码却按降序排：one-hot 权重（第二个）得到 -3/4，应为 3/4。",
            ),
            """\
weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
for name, value in article.analyze_attention_distribution(weights).items():
    print(name, [round(x, 4) for x in value.tolist()])
""",
        ),
    ),
    here=Step(
        Text("Each measure has a function:", "每个量都有一个函数："),
        """\
for measure in (functional.entropy_of, functional.gini, functional.max_weight, functional.effective_tokens):
    print(measure.__name__, [round(x, 4) for x in measure(weights).tolist()])
""",
    ),
)

GRADIENT = Case(
    name="004_softmax_gradient",
    title=Text("`softmax_gradient`", "`softmax_gradient`"),
    verdict=Text(
        "Right for the last dimension. Another `dim` fails, or is silently wrong if the tensor is square.",
        "对最后一维是对的；换一维就报错，如果是方阵，还会悄悄算错",
    ),
    line="softmax_jacobian(scores)",
    builds_on=("004_softmax_attention",),
    steps=(
        Step(
            Text("Compared with autograd:", "与自动微分对比："),
            """\
scores = torch.randn(3, 4)
expected = torch.stack([torch.autograd.functional.jacobian(lambda x: x.softmax(-1), row) for row in scores])
print(torch.allclose(article.softmax_gradient(scores), expected, atol=1e-6))
""",
        ),
        Step(
            None,
            """\
square = torch.randn(3, 3)
expected = article.softmax_gradient(square.T)
print(torch.allclose(article.softmax_gradient(square, dim=0), expected, atol=1e-6))
article.softmax_gradient(scores, dim=0)
""",
            """\
False
RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 2""",
        ),
        Step(None, "print(torch.allclose(functional.softmax_jacobian(square, dim=0), expected, atol=1e-6))\n", "True"),
    ),
    here=Step(
        Text("It takes any dimension and a temperature:", "哪一维都行，还可以带温度："),
        """\
print(torch.allclose(functional.softmax_jacobian(scores), article.softmax_gradient(scores), atol=1e-6))
print(functional.softmax_jacobian(scores, dim=0, temperature=2.0).shape)
""",
    ),
)

OPTIMISATION = Case(
    name="004_optimisation",
    title=Text("the optimisation (pseudo code)", "计算优化（伪代码）"),
    verdict=Text(
        "Pseudo code that stops at `flash_attention`. Only one half has dropout.",
        "如文中所说，是伪代码，运行到 `flash_attention` 就停；而且只有一半带 dropout",
    ),
    line="attention(query, key, value)",
    inputs="import torch\nquery, key, value = torch.randn(3, 2, 4, 6, 8).unbind()\nhead_dim = 8\n",
    steps=(
        Step(
            None,
            "print(article.attention_probs.shape)\n",
            "torch.Size([2, 4, 6, 6])",
        ),
    ),
    here=Step(
        Text(
            "Output and statistics in one pass:",
            "一遍同时得到输出和统计量，没有 n x n 的张量：",
        ),
        """\
result = attemper.attention(article.query, article.key, article.value, stats="all")
print(torch.allclose(result.output, article.attention_probs @ article.value, atol=1e-6))
print(torch.allclose(result.stats.max_weight, article.attention_probs.amax(-1), atol=1e-6))
""",
    ),
)

ADAPTIVE = Case(
    name="004_adaptive_softmax",
    title=Text("`AdaptiveSoftmax`", "`AdaptiveSoftmax`"),
    verdict=Text("Right until training pushes the temperature below 0.", "在训练把温度推到 0 以下之前，是对的"),
    line="softmax(scores, temperature=tensor)",
    steps=(
        Step(
            Text(
                "Gradient descent crosses 0, and the smallest score gets the largest weight:",
                "没有约束保证温度为正：梯度下降一旦越过 0，分数最小的反而权重最大。",
            ),
            """\
module = article.AdaptiveSoftmax()
optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
scores = torch.tensor([1.0, 2.0, 3.0])
for step in range(4):
    weights = module(scores)
    print(f"temperature {module.temperature.item():.3f}, weights {[round(p, 3) for p in weights.tolist()]}")
    optimizer.zero_grad()
    (-weights[2].log()).backward()
    optimizer.step()
""",
        ),
    ),
    here=Step(
        Text(
            "As an exponential it stays above 0, as in `attemper.nn.LearnedTemperature`.",
            "温度可以是能求导的张量。写成指数形式，温度就始终大于 0；`attemper.nn.LearnedTemperature` 正是如此。",
        ),
        """\
log_temperature = torch.zeros((), requires_grad=True)
optimizer = torch.optim.SGD([log_temperature], lr=1.0)
for step in range(4):
    weights = functional.softmax(scores, temperature=log_temperature.exp())
    print(f"temperature {log_temperature.exp().item():.3f}, weights {[round(p, 3) for p in weights.tolist()]}")
    optimizer.zero_grad()
    (-weights[2].log()).backward()
    optimizer.step()
""",
    ),
)

MIXED = Case(
    name="004_mixed_precision",
    title=Text("`mixed_precision_softmax`", "`mixed_precision_softmax`"),
    verdict=Text("Right for half precision, but float64 loses digits.", "半精度是对的；float64 反而丢精度"),
    line="softmax(scores)",
    builds_on=("004_softmax_attention",),
    steps=(
        Step(
            Text(
                "bfloat16 is right. Computed in float32, float64 loses half of its digits:",
                "bfloat16 用 float32 计算，没有错；float64 也这样算，就丢掉一半的有效数字：",
            ),
            """\
scores = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
half, double = article.mixed_precision_softmax(scores.bfloat16()), article.mixed_precision_softmax(scores)
print(half.dtype, torch.equal(half, scores.bfloat16().float().softmax(-1).bfloat16()))
print(double.dtype, (double - scores.softmax(-1)).abs().max().item() > 1e-9)
""",
        ),
    ),
    here=Step(
        Text("It uses at least float32, and float64 for float64:", "至少用 float32 计算；float64 仍用 float64："),
        """\
print(torch.equal(functional.softmax(scores.bfloat16()), half))
print((functional.softmax(scores) - scores.softmax(-1)).abs().max().item() < 1e-15)
""",
    ),
)
