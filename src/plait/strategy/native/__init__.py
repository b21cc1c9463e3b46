"""The engine on plain PyTorch."""
