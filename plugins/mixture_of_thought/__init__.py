"""Mixture of Thought: one question, several ways of reasoning, one vote."""

from llm_steer.plugins.mixture_of_thought.params import MixtureOfThoughtParams
from llm_steer.plugins.mixture_of_thought.plugin import MixtureOfThought

__all__ = ["MixtureOfThought", "MixtureOfThoughtParams"]
