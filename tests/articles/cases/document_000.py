"""Document 000: temperature and attention entropy."""

from __future__ import annotations

from tests.articles.case import Case, Document, Step, Text
from tests.articles.cases.document_000_monitoring import ANOMALY, DEBUG, MONITOR

CONDITIONAL = Case(
    name="000_conditional_temperature",
    title=Text("`ConditionalTemperatureAttention`", "`ConditionalTemperatureAttention`"),
    verdict=Text(
        "`forward` fails. Once fixed, it looks into the future, and a temperature of 0 makes every weight NaN.",
        "`forward` 会报错；修好之后又会看到后面的 token，温度为 0 时权重全是 NaN",
    ),
    line="attention(..., temperature=tensor)",
    steps=(
        Step(
            Text(
                "`forward` uses `d_model`, which only `__init__` knows:",
                "`forward` 用到了 `d_model`，但它只存在于 `__init__` 里：",
            ),
            """\
layer = article.ConditionalTemperatureAttention(16, 4)
x = torch.randn(1, 6, 16)
layer(x)
""",
        ),
        Step(
            Text(
                "Its temperature is a mean over the sequence, padding included. Another *last* token "
                "changes the weights of the *first*:",
                "补上就能运行。但温度取自整个序列（含 padding）的均值：换掉*最后*一个 token，*第一个*"
                " token 的权重也跟着变。",
            ),
            """\
article.d_model = 16
other = x.clone()
other[0, -1] = 10.0
for sequence in (x, other):
    weights = layer(sequence)[1][0, 0, 0]
    print(f"{(weights[0] / weights[1]).item():.4f}")
""",
        ),
        Step(
            None,
            """\
layer.temp_net[2].bias.data.fill_(-110.0)
print(layer.temp_net(x.mean(dim=1)).tolist(), layer(x)[1].isnan().all().item())
layer.temp_net[2].bias.data.zero_()
""",
            "[[0.0, 0.0, 0.0, 0.0]] True",
        ),
    ),
    here=Step(
        Text(
            "It takes a temperature of any shape up to [B, H, Q]. `attemper.nn.ConditionalTemperature` predicts "
            "one per query, between a floor and a ceiling.",
            "能广播到 [B, H, Q] 的温度都可以传给 `attention`，这里就把文章的温度传进去。"
            "`attemper.nn.ConditionalTemperature` 则由每个 query 各自预测温度，并限制在上下限之间。",
        ),
        """\
q, k, v = (p(x).view(1, 6, 4, 4).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
temperature = layer.temp_net(x.mean(dim=1))[:, :, None]  # [B, H, 1]
result = attemper.attention(q, k, v, temperature=temperature, stats="all")
output = layer.out_proj(result.output.transpose(1, 2).reshape(1, 6, 16))
print(torch.allclose(output, layer(x)[0], atol=1e-6), result.stats.per_head()["entropy"].mean)
""",
    ),
)

LAYERWISE = Case(
    name="000_layerwise_schedule",
    title=Text("`LayerwiseTemperatureSchedule`", "`LayerwiseTemperatureSchedule`"),
    verdict=Text("Linear and exponential are right. The u is upside down.", "linear 和 exp 是对的；u 型上下颠倒"),
    line="schedules.layerwise(...)",
    steps=(
        Step(
            None,
            """\
for pattern in ("linear", "exp", "no such pattern"):
    schedule = article.LayerwiseTemperatureSchedule(5, pattern=pattern)
    print(pattern, [round(schedule.get_temperature(layer), 4) for layer in range(5)])
""",
            """\
linear [0.5, 0.625, 0.75, 0.875, 1.0]
exp [0.5, 0.5946, 0.7071, 0.8409, 1.0]
no such pattern [1.0, 1.0, 1.0, 1.0, 1.0]""",
        ),
        Step(
            Text(
                "The comment promises a high start and end; the code does the reverse. An unknown pattern gives 1.0.",
                "注释写“中间低，两端高”，代码正好相反。pattern 的名字写错，就直接返回 1.0。",
            ),
            """\
schedule = article.LayerwiseTemperatureSchedule(5, pattern="u")
print([round(schedule.get_temperature(layer), 4) for layer in range(5)])
""",
        ),
    ),
    here=Step(
        Text(
            "Pass the list to `attemper.temper(model, temperature=[...])`:",
            "把列表传给 `attemper.temper(model, temperature=[...])`，每层一个温度：",
        ),
        """\
for shape in ("linear", "u", "exponential"):
    print(shape, [round(T, 4) for T in attemper.schedules.layerwise(5, 0.5, 1.0, shape)])
""",
    ),
)

REGULARIZED = Case(
    name="000_entropy_regularized",
    title=Text(
        "`entropy_regularized_attention_loss`, `EntropyRegularizedTransformer`",
        "`entropy_regularized_attention_loss`、`EntropyRegularizedTransformer`",
    ),
    verdict=Text(
        "The loss is right, except in float16. Around a model it is silently 0. With eager attention it sums over "
        "layers, and each token predicts itself.",
        "损失本身除 float16 外都对；用到模型上，要么悄悄变成 0，要么（eager）对各层求和，标签又没有错开一位",
    ),
    line='attention(..., stats=("entropy",))',
    needs_model=True,
    steps=(
        Step(
            None,
            """\
weights = torch.softmax(torch.randn(2, 4, 6, 6), dim=-1)
print(article.entropy_regularized_attention_loss(weights), -0.01 * functional.entropy_of(weights).mean())
""",
            "tensor(-0.0149) tensor(-0.0149)",
        ),
        Step(
            Text(
                "In float16, 1e-10 rounds to 0, and a weight of 0 gives NaN:",
                "float16 下 1e-10 的 eps 被舍入成 0，只要有一个权重为 0 就得到 NaN：",
            ),
            "print(article.entropy_regularized_attention_loss(torch.tensor([[1.0, 0.0]], dtype=torch.float16)))\n",
        ),
        Step(
            Text(
                "SDPA, the default of transformers, returns no weights, so the term is 0:",
                "transformers 默认用 SDPA，拿不到权重，这一项是整数 0：",
            ),
            """\
regularized = article.EntropyRegularizedTransformer(model)
print(regularized(tokens, labels=tokens)["ent_loss"])
""",
        ),
        Step(
            None,
            """\
model.set_attn_implementation("eager")
losses = regularized(tokens, labels=tokens)
with torch.no_grad():
    outputs = model(tokens, labels=tokens, output_attentions=True)
mean = -0.01 * sum(functional.entropy_of(weights).mean() for weights in outputs.attentions) / 2
print(f"sum over layers {losses['ent_loss'].item():.4f}, mean over layers {mean.item():.4f}")
print(f"their cross-entropy {losses['task_loss'].item():.4f}, the model's {outputs.loss.item():.4f}")
""",
            """\
sum over layers -0.0166, mean over layers -0.0083
their cross-entropy 5.7750, the model's 5.5780""",
        ),
    ),
    here=Step(
        Text(
            "The gradient is exact, and no n x n tensor is kept. For a whole model, use "
            "`attemper.regularize(model, attemper.EntropyBonus(0.01))`.",
            "梯度精确，不保留 n x n 的张量。整个模型用 `attemper.regularize(model, attemper.Entro"
            "pyBonus(0.01))`，取各层平均。",
        ),
        """\
q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
penalty = -0.01 * attemper.attention(q, k, v, stats=("entropy",)).stats.entropy.mean()
print(penalty, article.entropy_regularized_attention_loss(torch.softmax(q @ k.mT / 8**0.5, dim=-1)))
""",
    ),
)

SCHEDULE = Case(
    name="000_entropy_schedule",
    title=Text("`EntropySchedule`", "`EntropySchedule`"),
    verdict=Text(
        "It starts at temperature 0, which gives NaN, and its cosine runs backwards. The curriculum is right.",
        "温度从 0 开始，得到 NaN；余弦的方向反了。curriculum 是对的",
    ),
    line="schedules.warmup_anneal(...)",
    steps=(
        Step(
            Text(
                "It starts at 0, drops from 2 to 0.1 after warm-up, then *rises* to 2.0:",
                "温度从 0 开始，预热一结束就从 2 掉到 0.1，然后一路*升*到 2.0：",
            ),
            """\
schedule = article.EntropySchedule()
for step in (0, 5, 9, 10, 55, 100):
    print(step, round(schedule.get_temperature(step, 100), 4))
""",
        ),
        Step(
            None,
            "print(torch.softmax(torch.tensor([1.0, 2.0]) / schedule.get_temperature(0, 100), dim=-1))\n",
            "tensor([nan, nan])",
        ),
        Step(
            None,
            """\
for kind in ("curriculum", "contrastive"):
    schedule = article.EntropySchedule(kind)
    print(kind, [round(schedule.get_temperature(step, 100), 4) for step in (0, 50, 100)])
""",
            """\
curriculum [2.0, 1.05, 0.1]
contrastive [1.0, 1.0, 1.0]""",
        ),
    ),
    here=Step(
        Text(
            "It starts at 1. A temperature of 0 raises an error:",
            "温度从 1 开始；温度为 0 会报错，不会算出 NaN：",
        ),
        """\
schedule = attemper.schedules.warmup_anneal(2.0, 0.1)
for step in (0, 5, 10, 55, 100):
    print(step, round(schedule(step, 100), 4))
functional.softmax(torch.tensor([1.0, 2.0]), temperature=0.0)
""",
    ),
)

DOCUMENT = Document(
    number="000",
    title=Text("temperature and attention entropy", "温度与注意力熵"),
    about=Text(
        "arXiv 2412.16545 is *Attention Entropy is a Key Factor: An Analysis of Parallel "
        "Context Encoding with Full-attention-based Pre-trained Language Models*; the article "
        "gives another title.",
        "文末引用的 arXiv 2412.16545，真实标题是 *Attention Entropy is a Key Factor: An Analy"
        "sis of Parallel Context Encoding with Full-attention-based Pre-trained Language Mode"
        "ls*，文中写错了。",
    ),
    cases=(CONDITIONAL, LAYERWISE, REGULARIZED, SCHEDULE, MONITOR, ANOMALY, DEBUG),
)
