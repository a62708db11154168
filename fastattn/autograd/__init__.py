"""Each primitive as a PyTorch operator: saved tensors, derivative, batching rule, fake kernel."""
