"""What methods are compared with: published ways to make a model reflect less or longer, by logits alone."""

from .alpha_one import AlphaOne, AlphaOneParams
from .budget_forcing import BudgetForcing, BudgetForcingParams
from .no_wait import NoWait, NoWaitParams
from .tip import Tip, TipParams

__all__ = [
    "AlphaOne",
    "AlphaOneParams",
    "BudgetForcing",
    "BudgetForcingParams",
    "NoWait",
    "NoWaitParams",
    "Tip",
    "TipParams",
]
