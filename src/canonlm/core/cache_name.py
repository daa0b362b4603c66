"""The name of the cache in models of transformers, as an argument and in their outputs."""

from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""`past_key_values` before transformers 5.24."""

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""All names: that of today, that of older versions, and those of recurrent models in these."""
