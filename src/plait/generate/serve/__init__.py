"""A model behind HTTP, in the words of OpenAI's API."""

from plait.errors import MissingExtraError

try:
    import prometheus_client
    import starlette
    import uvicorn
except ImportError as missing:
    raise MissingExtraError(missing.name or "starlette", "plait serve", "serve") from missing

from plait.generate.serve.app import HERE
from plait.generate.serve.limits import Limits
from plait.generate.serve.server import Server

__all__ = ["HERE", "Limits", "Server"]
