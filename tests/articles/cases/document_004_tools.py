"""Document 004, its second half: kernels, entmax, tools of analysis, practice."""

from __future__ import annotations

from tests.articles.case import Case, Step, Text

KERNEL = Case(
    name="004_kernel_attention",
    title=Text("`kernel_attention`", "`kernel_attention`"),
    verdict=Text(
        "Right for one head. It fails on [B, H, Q, D] and is not causal.", "单头正确；[B, H, Q, D] 输入报错；不支持因果"
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
            Text("With a head dimension, `bmm` fails:", "多出头这一维，`bmm` 就报错："),
            "article.kernel_attention(*torch.randn(3, 2, 4, 6, 8).unbind())\n",
        ),
    ),
    here=Step(
        Text(
            "It works with or without heads, causal or not, and keeps a state for decoding. "
            "[linear-attention.md](../linear-attention.md) says when to use it.",
            "带不带头的维度都行，支持因果，并带有用于解码的状态。对应的模块是 `attemper.nn.LinearAttention`；"
            "何时该用，见 [linear-attention.md](../linear-attention.md)（英文）。",
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
        "Its threshold function does not exist. The result is right if that returns 2 tau, wrong if it returns tau.",
        "阈值函数不存在；它若返回 2 tau 则正确，若返回 tau 则错误",
    ),
    line="entmax15(scores)",
    steps=(
        Step(
            Text("The article never defines the function:", "文中从未给出这个辅助函数："),
            "scores = torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64)\narticle.entmax15(scores)\n",
        ),
        Step(
            Text(
                "Entmax is (x/2 - tau)², clamped at 0 before squaring. With 2 tau the snippet is right; with tau, as "
                "in the paper's algorithm, the weights do not sum to 1. The article cites the sparsemax paper; entmax "
                "is from Peters, Niculae and Martins 2019.",
                "entmax 1.5 的定义是先把 (x/2 - tau) 在 0 处截断再平方；下面用二分法求出这个 tau。片段对不对，取决于"
                "那个缺失的函数按什么尺度返回阈值。传给它的是 x 而不是 x/2：如果按 x 的尺度返回 2 tau，那么 "
                "0.5 (x - 2 tau) 就是 x/2 - tau，结果正确；如果像论文算法那样先把分数减半、再返回 tau，那么 tau 也被"
                "减半，权重之和就不是 1。它引用的是 sparsemax 的论文；entmax 出自 Peters、Niculae 与 Martins 2019。",
            ),
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
        ),
    ),
    here=Step(
        Text(
            "Threshold and gradient are exact. `entmax(scores, alpha)` takes any alpha above 1. In attention, "
            'pass `normalizer="entmax15"`.',
            "阈值与梯度都是精确的；`entmax(scores, alpha)` 支持任意大于 1 的 alpha，alpha 还可以学习；注意力里写 "
            '`attention(..., normalizer="entmax15")`，不产生 n x n 的权重。',
        ),
        """\
print(functional.entmax15(scores), functional.entmax(scores, 1.5))
""",
    ),
)

ANALYSIS = Case(
    name="004_analyze_distribution",
    title=Text("`analyze_attention_distribution`", "`analyze_attention_distribution`"),
    verdict=Text("Right, but its Gini coefficient has the wrong sign.", "其余正确，但基尼系数符号反了"),
    line="entropy_of, gini, max_weight, effective_tokens",
    steps=(
        Step(
            Text(
                "The code sorts in descending order, but the formula needs ascending. One-hot weights (second) give "
                "-3/4 instead of 3/4:",
                "依次是均匀、one-hot 和介于两者之间的权重。公式要求升序，代码却按降序排列：one-hot 的基尼系数成了 "
                "-3/4，而不是 3/4。",
            ),
            """\
weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
for name, value in article.analyze_attention_distribution(weights).items():
    print(name, [round(x, 4) for x in value.tolist()])
""",
        ),
    ),
    here=Step(
        Text("Each measure has a function:", "一个函数对应一个量："),
        """\
for measure in (functional.entropy_of, functional.gini, functional.max_weight, functional.effective_tokens):
    print(measure.__name__, [round(x, 4) for x in measure(weights).tolist()])
""",
    ),
)

GRADIENT = Case(
    name="004_softmax_gradient",
    title=Text("`softmax_gradient`", "`softmax_gradient`"),
    verdict=Text("Right for the last dimension only.", "只有最后一维时正确"),
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
            Text(
                "`dim` reaches the softmax but not the Jacobian. Another dimension fails, or is silently wrong if the "
                "tensor is square:",
                "`dim` 只传给了 softmax，没有用在雅可比矩阵上：换一维会报错；如果张量是方阵，则悄悄给出错误结果。",
            ),
            """\
square = torch.randn(3, 3)
expected = article.softmax_gradient(square.T)
print(torch.allclose(article.softmax_gradient(square, dim=0), expected, atol=1e-6))
article.softmax_gradient(scores, dim=0)
""",
        ),
    ),
    here=Step(
        Text("It takes any dimension and a temperature:", "任意维度，还可带温度："),
        """\
print(torch.allclose(functional.softmax_jacobian(scores), article.softmax_gradient(scores), atol=1e-6))
print(torch.allclose(functional.softmax_jacobian(square, dim=0), expected, atol=1e-6))
""",
    ),
)

OPTIMISATION = Case(
    name="004_optimisation",
    title=Text("the optimisation (pseudo code)", "计算优化（伪代码）"),
    verdict=Text(
        "Pseudo code that stops at `flash_attention`. Only one half has dropout.",
        "如其所言是伪代码，停在 `flash_attention`；而且只有一半带 dropout",
    ),
    line="attention(query, key, value)",
    inputs="import torch\nquery, key, value = torch.randn(3, 2, 4, 6, 8).unbind()\nhead_dim = 8\n",
    steps=(
        Step(
            Text(
                "The first half ends at the weights, without dropout. The second would return the output, with "
                "dropout 0.1.",
                "前半段能运行，止于权重，没有 dropout；后半段则会返回输出，并带 0.1 的 dropout。",
            ),
            "print(article.attention_probs.shape)\n",
        ),
    ),
    here=Step(
        Text(
            "One pass gives the output and the statistics, without an n x n tensor:",
            "一趟算完，不产生 n x n 的张量，统计量一并得到：",
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
    verdict=Text("Right until training pushes the temperature below 0.", "训练把温度推到 0 以下之前是对的"),
    line="softmax(scores, temperature=tensor)",
    steps=(
        Step(
            Text(
                "Nothing keeps the temperature positive. Gradient descent crosses 0, and the smallest score gets the "
                "largest weight:",
                "没有任何机制让温度保持为正。为了变得更尖锐，梯度下降会直接越过 0，于是最小的分数反而权重最大：",
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
            "You can differentiate a tensor temperature. Written as an exponential, it stays above 0, as in "
            "`attemper.nn.LearnedTemperature`.",
            "温度可以是张量并参与求导；写成参数的指数，就始终大于 0。`attemper.nn.LearnedTemperature` 对注意力层就是这"
            "样做的，并限制在上下限之间。",
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
    verdict=Text("Right for half precision, but float64 loses digits.", "半精度正确；float64 反而丢精度"),
    line="softmax(scores)",
    builds_on=("004_softmax_attention",),
    steps=(
        Step(
            Text(
                "It computes bfloat16 in float32, as it should. It does the same to float64, which loses half of its "
                "digits:",
                "bfloat16 用 float32 计算，这是应该的；但 float64 也用 float32 计算，丢掉了一半的有效位：",
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
        Text("It uses at least float32, and float64 for float64:", "至少用 float32，float64 则保持 float64："),
        """\
print(torch.equal(functional.softmax(scores.bfloat16()), half))
print((functional.softmax(scores) - scores.softmax(-1)).abs().max().item() < 1e-15)
""",
    ),
)
