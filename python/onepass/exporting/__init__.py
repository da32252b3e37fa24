"""Writing a fused model as one file that needs PyTorch and a CUDA toolkit: what `python -m onepass export` does."""
