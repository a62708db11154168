"""PyTorch's attention on each packed sequence in turn: the provider `benchmarks.torch_loop`."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool = False,
) -> Tensor:
    """[T, H, D], of sequences that attend to themselves."""
    lengths, grouped = cu_seqlens_q.diff().tolist(), query.shape[1] != key.shape[1]
    outs = [
        scaled_dot_product_attention(
            *(rows.transpose(0, 1)[None] for rows in rows_of_each),
            is_causal=is_causal,
            enable_gqa=grouped,
        )
        for rows_of_each in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    ]
    return torch.cat([out[0].transpose(0, 1) for out in outs])
