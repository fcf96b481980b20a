"""``python -m llm_steer`` is ``llm-steer``."""

from llm_steer.cli import main

main()
