"""A model behind HTTP, in the words of OpenAI's API."""

from plait.generate.serve.server import Limits, Server

__all__ = ["Limits", "Server"]
