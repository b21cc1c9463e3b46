"""Offloading: parameters, gradients, optimizer state and activations are kept in host memory or in files."""
