"""`deepspeed.ops`: its optimizers, as torch's and Plait's own. None of them is compiled when first used."""
