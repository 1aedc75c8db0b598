"""Document 000, its second half: monitoring, anomalies, debugging."""

from __future__ import annotations

from tests.articles.case import Case, Step, Text

MONITOR = Case(
    name="000_entropy_monitor",
    title=Text("`AttentionEntropyMonitor`", "`AttentionEntropyMonitor`"),
    verdict=Text(
        "Right once it has two samples, but it counts padded queries.",
        "有两次以上采样，结果就是对的，但 padding 的 query 也算了进去",
    ),
    line="watch(model)",
    needs_model=True,
    steps=(
        Step(
            None,
            """\
monitor = article.AttentionEntropyMonitor(num_layers=1, num_heads=4)
scores = torch.randn(2, 4, 6, 6)
for step in range(1, 6):
    monitor.analyze(0, torch.softmax(step * scores, dim=-1))
for name, value in monitor.get_statistics()["layer_0"].items():
    print(name, np.round(value, 4))
""",
            """\
mean [0.7696 0.9347 0.8698 0.8697]
std [0.375  0.3591 0.3927 0.3763]
trend -0.2571""",
        ),
        Step(
            Text("After a single sample, it fails:", "只有一次采样，就无法拟合直线："),
            """\
monitor = article.AttentionEntropyMonitor(num_layers=1, num_heads=4)
monitor.analyze(0, torch.rand(2, 4, 6, 6).softmax(-1))
monitor.get_statistics()
""",
        ),
    ),
    here=Step(
        Text(
            "It works with any kernel and leaves padded queries out.",
            "用什么 kernel 都行，padding 的 query 不计入。",
        ),
        """\
with attemper.watch(model) as watch:
    model(tokens)
ours = [head.entropy_nats for head in watch.table().sites[0].heads]
model.set_attn_implementation("eager")
theirs = monitor.compute_entropy(model(tokens, output_attentions=True).attentions[0])
print([round(entropy, 4) for entropy in ours], [round(entropy, 4) for entropy in theirs.tolist()])
""",
    ),
)

ANOMALY = Case(
    name="000_detect_anomaly",
    title=Text("`detect_attention_anomaly`", "`detect_attention_anomaly`"),
    verdict=Text(
        "It fails on the monitor's own statistics. Its limits in nats fit one length only.",
        "接不上监控器自己的结果；阈值以 nats 为单位，只适合一种长度",
    ),
    line="scan(model, batches).alarms",
    steps=(
        Step(
            Text(
                "The monitor returns a mean per head; this function expects one number:",
                "上面的监控器按头给出均值，这个函数却要一个数：",
            ),
            'article.detect_attention_anomaly({"layer_0": {"mean": np.array([1.2, 2.9])}})\n',
        ),
        Step(
            None,
            'article.detect_attention_anomaly({"layer_0": {"mean": np.array([1.2])}})\n',
            "TypeError: unsupported format string passed to numpy.ndarray.__format__",
        ),
        Step(
            Text(
                "It assumes 512 keys: uniform attention over 7 counts as a collapse, over 274 as normal:",
                "它假定有 512 个 key。同样是完全均匀的注意力，有 7 个 key 就判成坍缩，有 274 个又判成正常。",
            ),
            """\
for n in (7, 8, 274, 275, 512):
    found = article.detect_attention_anomaly({"layer_0": {"mean": math.log(n)}})
    print(n, [anomaly["type"] for anomaly in found])
""",
        ),
    ),
    here=Step(
        Text(
            "Alarms divide the entropy by the log of the visible keys. Uniform attention over 40 keys:",
            "警报看的是熵除以可见 key 数的对数。以 40 个 key 的均匀注意力为例：",
        ),
        """\
class Uniform(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(torch.zeros_like(x), x, x)

for alarm in attemper.scan(Uniform(), [torch.randn(1, 1, 40, 8)], limits={"diffuse": 0.95}).alarms:
    print(alarm.kind, round(alarm.value, 3))
""",
    ),
)

DEBUG = Case(
    name="000_debug_entropy",
    title=Text("`debug_attention_entropy`", "`debug_attention_entropy`"),
    verdict=Text(
        "It is silent on SDPA models. With eager attention it needs `attention_entropy`, which does not exist, and "
        "leaves eval mode on.",
        "用 SDPA 的模型什么也读不出；换成 eager，`attention_entropy` 又没有定义，还把模型留在 eval 模式",
    ),
    line="scan(model, [batch])",
    needs_model=True,
    steps=(
        Step(
            Text(
                "With SDPA there are no weights, so the list is empty:",
                "SDPA 拿不到权重，返回空列表：",
            ),
            'batch = {"input_ids": tokens}\nprint(article.debug_attention_entropy(model, batch))\n',
        ),
        Step(
            None,
            'model.set_attn_implementation("eager")\narticle.debug_attention_entropy(model, batch)\n',
            "NameError: name 'attention_entropy' is not defined",
        ),
        Step(
            None,
            """\
article.attention_entropy = lambda weights: functional.entropy_of(weights).mean(dim=(0, 2))
entropies = article.debug_attention_entropy(model.train(), batch, threshold_low=1.5)
print(model.training)
""",
            """\
[WARN] Layer 0, Head 0: Low entropy 0.773
[WARN] Layer 0, Head 1: Low entropy 0.932
[WARN] Layer 0, Head 2: Low entropy 0.762
[WARN] Layer 0, Head 3: Low entropy 0.740
[WARN] Layer 1, Head 0: Low entropy 0.771
[WARN] Layer 1, Head 1: Low entropy 0.935
[WARN] Layer 1, Head 2: Low entropy 0.780
[WARN] Layer 1, Head 3: Low entropy 0.966
False""",
        ),
    ),
    here=Step(
        Text(
            "It keeps the model's mode.",
            "`scan` 读出同样的值，又不改变模型的状态。",
        ),
        """\
scan = attemper.scan(model.train(), [batch])
print(model.training)
for site in scan.sites:
    print(site.name, [round(head.entropy_nats, 3) for head in site.heads])
""",
    ),
)
