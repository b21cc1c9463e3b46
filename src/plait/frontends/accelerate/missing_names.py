"""What to use in place of names of Accelerate that this front end lacks."""

from __future__ import annotations

from plait.frontends import MirroredPackage

_WHOLE = "models for inference alone are loaded and placed with transformers or with Accelerate itself"
_LAUNCH = "start the script with `plait launch` or torchrun; one process needs no launcher"
_PRECISION = "Accelerator(sections={'precision': 'fp8'}) computes matrix products in 8 bits"
_INSTEAD = {
    **dict.fromkeys(
        (
            "big_modeling",
            "cpu_offload",
            "dispatch_model",
            "disk_offload",
            "infer_auto_device_map",
            "init_empty_weights",
            "init_on_device",
            "load_checkpoint_and_dispatch",
            "load_checkpoint_in_model",
        ),
        _WHOLE,
    ),
    **dict.fromkeys(("debug_launcher", "launchers", "notebook_launcher"), _LAUNCH),
    **dict.fromkeys(("AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"), _PRECISION),
    "GradientState": "use `accelerator.gradient_state`",
    "MegatronLMPlugin": "write `megatron_lm_config` in the file of Accelerator(config_file=…), or `strategy.layout`",
    "inference": "set `strategy.layout.pp` and use `plait train` for pipeline stages",
    "local_sgd": "gradients are reduced in every step; `gradient_accumulation_steps` reduces them less often",
    "prepare_pippy": "set `strategy.layout.pp` and use `plait train` for pipeline stages",
}

ACCELERATE = MirroredPackage("plait.frontends.accelerate", "accelerate", "Accelerate", "docs/accelerate.md", _INSTEAD)
not_offered = ACCELERATE.not_offered
