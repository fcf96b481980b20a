"""A small reasoning model of our own, with the tasks that it was made for.

It thinks, slips, reflects and corrects itself, so what a steering method does can be seen on a CPU in seconds. It is a toy:
it tests mechanisms, and predicts nothing about large models.
"""

from pathlib import Path

MODELS = Path(__file__).parent / "models"
"""Folder with a Hugging Face folder for each checkpoint: ``arithmetic`` and ``logic``."""
