"""One client over every engine: see :mod:`llm_steer.engines.base`."""

from llm_steer.engines.base import Engine, Request, Response, Sampling, Stream

__all__ = ["Engine", "Request", "Response", "Sampling", "Stream"]
