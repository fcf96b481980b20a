"""Muon: momentum whose matrices are orthogonalised before they are applied. A third of AdamW's steps do for a network
this small. Embeddings, norms and biases stay with AdamW."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Muon(torch.optim.Optimizer):
    """For matrices ``[out, in]`` only; after Keller Jordan's, with momentum 0.95 and Nesterov's look-ahead."""

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            momentum, lr = group["momentum"], group["lr"]
            updates: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - momentum)
                updates.setdefault(p.shape, []).append((p, p.grad.lerp(buffer, momentum)))
            for shape, pairs in updates.items():  # matrices of one shape share a batched product
                direction = orthogonalise(torch.stack([update for _, update in pairs]))
                scale = 0.2 * max(shape) ** 0.5  # about the size of AdamW's updates, so both share a learning rate
                for (p, _), update in zip(pairs, direction, strict=True):
                    p.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * scale)


def orthogonalise(matrices: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """Push the singular values of ``[n, out, in]`` towards 1 by Newton-Schulz iteration."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(rounds):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    result: torch.Tensor = x.mT if tall else x
    return result
