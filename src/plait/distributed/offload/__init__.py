"""Memory beyond the device: fp32 weights, optimizer state and weights in host memory or in files."""
