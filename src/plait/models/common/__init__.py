"""What the model families share: protocol, attention, rotary positions, loss, initialisation, weight files."""
