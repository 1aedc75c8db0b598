"""``attemper.check``: what a model's tokens should see, rule by rule, and what they do see."""
