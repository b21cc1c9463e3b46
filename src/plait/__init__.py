"""Plait trains large PyTorch models."""
