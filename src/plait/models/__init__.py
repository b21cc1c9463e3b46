"""Models: what is trained.

`build_model` makes one from its section of the run description, on whatever device is current; under
`torch.device("meta")` it costs no memory. What the rest of the framework may ask of it is said in
`plait.models.common.protocol`.
"""

from plait.models.build import build_model, preset

__all__ = ["build_model", "preset"]
