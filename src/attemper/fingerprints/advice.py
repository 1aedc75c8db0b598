"""What to do about a difference of two runs, by its kind, and by its stage where that tells more.

Which of the two runs is right is not known, so nothing here says so. Where the cause is not known, it says only where
to look next.
"""

from __future__ import annotations

ADVICE = {
    "none": "Nothing to mend on these tokens. If you expected a difference, check that the two fingerprints are of the "
    "two engines, and try longer or other text.",
    "rounding": "Nothing to mend that these fingerprints show. Rounding hides smaller faults: to look for them, take "
    "both in float32, with weights that are not quantised.",
    "few_tokens": "Take both fingerprints in float32 and compare again. In a model with experts, rounding sends a few "
    "tokens to other experts.",
    "equivalent": "No fault was found on these tokens. Do not mix the two sets of weights: what one weight changes, "
    "another takes back.",
    "too_small": "The cause is not known. Take both fingerprints in float32, of more tokens, and compare again.",
    "input": "Look next at what stands between the block's input and its attention, in most models a norm: its "
    "weights and its epsilon.",
    "input residual": "Look next at what comes before this site: the MLP and the norms of the block before, or the "
    "embedding if it is the first.",
    "scale": "Check the scale that each engine gives its attention call: 1/sqrt(head size), unless the config says "
    "otherwise.",
    "scale q and k": "Check what multiplies queries or keys before the call: a norm on them, the scale of quantised "
    "weights, or the magnitude of a rotary embedding (YaRN).",
    "scale q and k heads": "Check what belongs to these heads alone: their rows of the query and key projections, the "
    "scale of their quantised blocks, a gain for each head. YaRN and the scale of the call are the same for all heads.",
    "scale q and k after": "Check what multiplies queries or keys of these heads behind the projections: a gain, or a "
    "norm, of each head. Weights of the projections agree; YaRN and the scale of the call are the same for all heads.",
    "softcap": "Check the cap of scores in the model's config, and that both engines apply it.",
    "logn": "Check log-n scaling and its length in the model's config, and that both engines apply it.",
    "key_shift": "Check what each engine adds to scores by key: a mask of numbers, or a bias.",
    "distance_bias": "Check the bias by distance (ALiBi or relative positions) of each engine: its slopes, and whether "
    "it is added.",
    "window": "Check the sliding window of this layer in the model's config, and whether each engine counts a row's "
    "own key as part of it.",
    "causality": "Check whether this layer should be causal, and at which key each engine ends a row.",
    "padding": "Give both runs the same attention mask and the same side of padding, and compare again.",
    "documents": "Check that both engines keep packed documents apart in the same way: by position ids, by sequence "
    "lengths, or by a mask.",
    "sink": "Check that both engines load the sinks of this layer and use them.",
    "rotary": "Check the rotary embedding of both engines: base, scaling, number of rotated features, and whether it "
    "pairs halves or neighbours. A converter may have reordered the projections for the other pairing.",
    "swapped": "Check by which names, or from which part of a fused weight, each engine loads the projections of this "
    "site.",
    "not_loaded": "Look for this site's projections, the named one first, in the loader's report: is a name missing, "
    "unexpected or mapped to another? Correct the name or the mapping, then load again.",
    "transposed": "Check how each engine stores the named weight: inputs x outputs, or outputs x inputs.",
    "order_of_layers": "Check how each loader numbers layers: the named weights are in the place of another layer's.",
    "head_order": "Check how each engine splits and joins heads: a fused projection, tensor parallel shards, or a "
    "converter.",
    "grouping": "Check which key head each query head reads: groups side by side (repeat_interleave), or in turn "
    "(repeat).",
    "key_rounding": "Check whether one run keeps its keys in a quantised cache. Turn that off to see the rest.",
    "bias": "Check the bias of the query and key projections: whether both engines load it and add it.",
    "weights": "The cause is not known. Look next at the query and key projections of this site, and at norms on them.",
    "weights named": "The rule that changed {name} of {place} is not known. Look next at that weight in both "
    "checkpoints, and at what each loader does to it.",
    "weights named head": "The rule that changed {name} of {place} is not known; head {head} shows it. Look next at "
    "that weight in both checkpoints, and at what each loader does to it.",
    "weights attention output": "The cause is not known. Look next at the output projection of this site.",
    "values": "The cause is not known. Look next at the value projection of this site.",
    "scores": "The cause is not known. Look next at what each engine adds to scores, or multiplies them by, at this "
    "site.",
    "scores visible keys": "The cause is not known. Look next at how each engine makes the mask of this site.",
    "scores head output": "Look next at the attention kernel of that run: its output does not follow from what it was "
    "given.",
    "output": "No attention differs. Look next at what comes after the last one: its MLP, the last norm, the head.",
    "not finite": "The cause is not known. Look next at what makes these numbers NaN or infinite in one run alone: "
    "damaged weights, or a type with too small a range.",
    "not finite in both": "Find what makes these numbers NaN or infinite in both runs. Nothing behind them can be "
    "compared until then.",
}
"""Kind, or kind and stage -> what to do. The two last are of findings that say so themselves, as are those of a weight
that is named, and of heads.
"""
AGAIN = "{then} Then compare again: later sites differ because of this one, and may have faults that it hides."
"""Around it, where a fault moves what all later sites read."""


def advice(kind: str, stage: str | None) -> str:
    """What to do about a kind of difference at a stage."""
    return ADVICE.get(f"{kind} {stage}", ADVICE.get(kind, ""))
