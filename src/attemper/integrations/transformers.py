"""``import attemper.integrations.transformers; model.set_attn_implementation("attemper")``: exact attention in any
model.
"""

from attemper.sites.transformers import NAME, register

register()

__all__ = ["NAME", "register"]
