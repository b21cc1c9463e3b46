"""`plait serve`: a model behind HTTP."""

from __future__ import annotations

import secrets
from pathlib import Path

import typer

from plait.cli.speaking import Opening, open_speaker
from plait.errors import GenerateError
from plait.generate import HERE, Limits, Server, printable


def serve(
    path: str, opening: Opening, *, host: str, port: int, token_file: str | None, open_to_all: bool, limits: Limits
) -> None:
    """Serve until interrupted. A token is made up and shown, unless a file has one or none is wanted."""
    if open_to_all and host not in HERE:
        raise GenerateError(f"--no-token with --host {host} would let anybody use this machine; give a token")
    token = None if open_to_all else _token(token_file)
    speaker = open_speaker(path, opening)
    try:
        server = Server(speaker, host=host, port=port, token=token, limits=limits, log=typer.echo)
    except OSError as error:
        raise GenerateError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    shown = "" if token is None else f"/#token={token}" if token_file is None else "/ (token from the file)"
    typer.echo(f"{printable(speaker.name)}: {server.url}{shown}")
    typer.echo(f"conversations are written with the template {speaker.template!r}")
    typer.echo(f"OpenAI-compatible: {server.url}/v1 (chat/completions, completions, models)")
    server.run()
    typer.echo("stopped")


def _token(file: str | None) -> str:
    """From the first line of a file, so that it is in no list of processes; or a new one."""
    if file is None:
        return secrets.token_urlsafe(24)
    try:
        token = Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise GenerateError(f"--token-file {file} cannot be read: {error}") from error
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise GenerateError(f"--token-file {file} must hold one word of ASCII characters, and nothing else")
    return token
