"""The part of an `Accelerator` that writes and reads: checkpoints, weights, and what trackers are told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError
from plait.frontends.accelerate import saving, weights
from plait.frontends.accelerate.loader import PreparedLoader, skip_first_batches
from plait.frontends.accelerate.preparing import Preparing


class Keeping(Preparing):
    """Saves what was prepared, and goes on from it."""

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have objects with `state_dict` and `load_state_dict` saved and loaded too."""
        misfits = [each for each in objects if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))]
        if misfits:
            names = ", ".join(type(each).__name__ for each in misfits)
            raise ModelError(f"{names} cannot be registered: state_dict and load_state_dict are needed")
        self._custom_objects.extend(objects)

    def save_state(self, output_dir: str | Path | None = None, **_: Any) -> str:
        """Write everything that was prepared or registered as a checkpoint of Plait's; returns its folder."""
        folder = weights.next_folder(self.project_configuration, output_dir, self.world)
        saving.save(self._belongings(), folder)
        if self._save_hooks:
            # As in Accelerate: hooks take from this list what they have saved themselves, and what is spread is not in
            # it. Here everything is saved, whatever they take.
            whole = [weights.whole(model, self.world) for model in self._models if not weights.is_spread(model)]
            for hook in self._save_hooks:
                hook([model.module for model in self._models], whole, str(folder))
        self.project_configuration.iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | Path | None = None, **_: Any) -> None:
        """Go on from a checkpoint that `save_state` wrote, under any strategy and number of ranks."""
        folder = weights.last_folder(self.project_configuration, input_dir, self.world)
        for hook in self._load_hooks:
            hook([model.module for model in self._models], str(folder))
        saving.load(self._belongings(), folder)

    def register_save_state_pre_hook(self, hook: Any) -> weights.Removable:
        """Call `hook(models, weights, folder)` with every `save_state`, once the folder is complete."""
        return weights.Removable(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Any) -> weights.Removable:
        """Call `hook(models, folder)` before every `load_state`."""
        return weights.Removable(self._load_hooks, hook)

    def _belongings(self) -> saving.Belongings:
        return saving.Belongings(
            self.config,
            self.world,
            self._optimizers,
            self._schedulers,
            self._dataloaders,
            self._custom_objects,
            self.gradient_state,
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole weights on the host; on rank 0 alone where they are spread. Every rank must ask."""
        return weights.whole(model, self.world)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the whole weights, as `model.safetensors` or in several such files with an index."""
        state = weights.whole(model, self.world)
        if self.is_main_process:
            weights.write(state, Path(save_directory), max_shard_size, safe=safe_serialization)
        self.wait_for_everyone()

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write an object from the main process."""
        if self.is_main_process:
            weights.write_object(obj, Path(f), safe=safe_serialization)

    def skip_first_batches(self, dataloader: PreparedLoader, num_batches: int | None = None) -> PreparedLoader:
        """The pass that a loader is in, without its first batches.

        Without a number: as many as the loaded state had seen, with whatever number of ranks it was saved.
        """
        return skip_first_batches(dataloader, num_batches)

    # ---- trackers

    @property
    def project_dir(self) -> str | Path | None:
        """Where the script writes."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """Where trackers write."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """How many states were saved."""
        return self.project_configuration.iteration

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open what `log_with` named. `init_kwargs["wandb"]` goes to `wandb.init`."""
        self._trackers.start(project_name, config, init_kwargs or {})

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Write numbers of one step, from the main process."""
        self._trackers.log(values, step, log_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """What `log_with` named, by its name; with `unwrap`, what it writes with."""
        return self._trackers.get(name, unwrap=unwrap)

    @property
    def trackers(self) -> list[Any]:
        """Everything that `log_with` named and `init_trackers` has opened."""
        return self._trackers.all

    def end_training(self) -> None:
        """Close the trackers, and leave the other ranks."""
        self._trackers.finish()
        self.world.close()
