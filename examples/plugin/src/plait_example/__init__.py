"""Parts for Plait: a model, an optimizer, a schedule, a log sink, a hook, an engine and a storage for checkpoints."""
