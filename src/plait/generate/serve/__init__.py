"""An HTTP server with OpenAI's API for one model."""

from plait.errors import MissingExtraError

try:
    from plait.generate.serve.app import LOCAL_NAMES, Limits
    from plait.generate.serve.server import Server
except ModuleNotFoundError as missing:
    package = (missing.name or "").partition(".")[0]
    if package not in ("prometheus_client", "starlette", "uvicorn"):
        raise
    raise MissingExtraError(package, "plait serve", "serve") from missing

__all__ = ["LOCAL_NAMES", "Limits", "Server"]
