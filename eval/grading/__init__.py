"""What a response answers, and whether that is right. The conventions stand in ``docs/evaluation.md``."""

from .answers import Verdict
from .boxes import last_box
from .graders import GRADERS, Gold, Grader
from .pool import MathPool

__all__ = ["GRADERS", "Gold", "Grader", "MathPool", "Verdict", "last_box"]
