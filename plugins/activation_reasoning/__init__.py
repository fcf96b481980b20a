"""ActivationReasoning: concepts in hidden states, rules that chain, and actions on what follows."""

from .params import ActivationReasoningParams
from .plugin import ActivationReasoning

__all__ = ["ActivationReasoning", "ActivationReasoningParams"]
