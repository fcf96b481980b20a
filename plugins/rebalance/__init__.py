"""ReBalance: the model's own confidence, step by step, sets the strength and sign of a steering vector."""

from .params import RebalanceParams
from .plugin import Rebalance

__all__ = ["Rebalance", "RebalanceParams"]
