"""`deepspeed.moe`."""
