"""What a pipeline sends, in theory."""

from __future__ import annotations

from plait.parallel.pipeline.schedule import placement_of


def pipeline_traffic(
    schedule: str,
    *,
    ranks: int,
    rank: int,
    micro_batches: int,
    activation_bytes: int,
    virtual: int | None = None,
    tied_bytes: int = 0,
    backward: bool = True,
) -> int:
    """The bytes that one rank sends in one step.

    With m micro-batches, and activations of a bytes between two stages:

        m · a · (stages of this rank whose next stage lies elsewhere
                 + stages of this rank whose previous stage lies elsewhere, where there is a backward pass)
        + the gradients of weights that the first and the last stage share, where they lie on different ranks

    So an inner rank with v stages sends 2 · v · m · a. What stages of one rank hand each other is not sent. The
    first time that inputs of some shape come, a few hundred bytes more tell each next stage what it will get.
    """
    placement = placement_of(schedule, ranks, virtual)
    last = len(placement) - 1
    crossings = 0
    for stage, owner in enumerate(placement):
        if owner != rank:
            continue
        crossings += stage < last and placement[stage + 1] != rank
        crossings += backward and stage > 0 and placement[stage - 1] != rank
    shares = rank in (placement[0], placement[last]) and placement[0] != placement[last]
    return crossings * micro_batches * activation_bytes + (tied_bytes if backward and shares else 0)
