"""Open-loop steering with one vector: a fixed one, and a random one as its control."""

from .params import ConstantVectorParams, RandomVectorParams
from .plugin import ConstantVector, RandomVector

__all__ = ["ConstantVector", "ConstantVectorParams", "RandomVector", "RandomVectorParams"]
