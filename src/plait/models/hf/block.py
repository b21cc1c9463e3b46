"""Which modules of a foreign model are its repeated units."""

from __future__ import annotations

from torch import nn

from plait.transformers_internals import no_split_modules


def find_block_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes that `transformers` never splits over devices; failing these, those of the longest list.

    What holds the input embedding is left out: it is no repeated unit, and a tied head shares its parameter,
    so both must stay with the root.
    """
    named = no_split_modules(model)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    found = dict.fromkeys(type(module) for module in model.modules() if type(module).__name__ in named)
    for module in model.modules():
        if type(module) in found and any(part is embedding for part in module.modules()):
            del found[type(module)]
    if not found:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        found = dict.fromkeys(type(module) for module in max(lists, key=len, default=()))
    return tuple(found)
