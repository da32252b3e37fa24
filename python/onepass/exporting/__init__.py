"""The export command: a fused model as one file that needs PyTorch and a CUDA toolkit."""
