"""`plait generate`."""

from __future__ import annotations

from pathlib import Path

import torch
import typer

from plait.checkpoint import CheckpointFolder, load_into, open_checkpoint
from plait.cli.here import import_from_here
from plait.config import parse
from plait.data import load_tokenizer, tokenizer_path
from plait.errors import ModelError
from plait.generate import sample
from plait.models import build_model
from plait.world import open_world


def generate(run_dir: str, prompt: str, *, new_tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Load the model of a run in this one process, and let it continue the prompt."""
    path = CheckpointFolder(Path(run_dir)).find(str(Path(run_dir).absolute()))  # absolute: `auto` is a name here
    assert path is not None
    checkpoint = open_checkpoint(path)
    settings = {**checkpoint.manifest.state["config"], "strategy": {}}
    config = parse(settings).config
    if config.model is None or config.data is None or (vocabulary := tokenizer_path(config.data)) is None:
        raise ModelError(f"{path} was not trained on text with a described model; there is nothing to generate from")
    tokenizer = load_tokenizer(vocabulary)
    world = open_world(config)
    import_from_here()
    model = build_model(config.model).to(world.device)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    persistent = model.state_dict().keys()
    tensors.update({f"model.{name}": buffer for name, buffer in model.named_buffers() if name in persistent})
    load_into(checkpoint, tensors, world=world, ignore=("optim.", "rng.", "hook."))
    ids = torch.tensor(tokenizer.encode(prompt) or [tokenizer.end], device=world.device)
    window = getattr(config.data, "seq_len", 512)
    tokens = sample(
        model,
        ids,
        new_tokens=new_tokens,
        window=window,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        end=tokenizer.end,
    )
    typer.echo(tokenizer.decode(tokens.tolist()))
