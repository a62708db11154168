"""Each primitive as an operator of PyTorch: what it saves, its derivative, batching and fake."""
