"""A small vision tower in plain torch: Conv3d patch embedding, blocks, rotary positions on a grid.

The blocks are the GPT's, without the causal mask. An image is a video of equal frames, as the
tower of Qwen2-VL (arXiv:2409.12191) takes a still image. The tower can be built on the meta device:

    with torch.device("meta"):
        tower = VisionTower()
    tower.to_empty(device="cpu")
    tower.reset_parameters()
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpt import Block, GPTConfig

SIDE = 8
"""Pixels of an image, each way."""
PATCH = 2
"""Pixels of a patch, each way."""
FRAMES = 2
"""Frames that a patch goes through; an image is repeated in each."""
GRID = SIDE // PATCH
"""Patches of an image, each way."""


class GridRotary(nn.Module):
    """Rotary positions on a grid: half of a head's pairs turn with the row, half with the column.

    The frequencies are no parameter and no part of a checkpoint, but a constant in fp32: in bf16
    the angles of distant patches would be off. So they stay fp32 whatever the model is converted
    to, and real whatever device it is built on; the axial form of arXiv:2403.13298.

    Attributes:
        frequencies: fp32 [head / 4], 10000^(-4 i / head); a non-persistent buffer.
    """

    frequencies: Tensor

    def __init__(self, head: int) -> None:
        """Take the features of one attention head, a multiple of 4."""
        super().__init__()
        self.head = head
        self.register_buffer("frequencies", self._compute(), persistent=False)

    def _compute(self) -> Tensor:
        """The frequencies on the CPU, also below `torch.device("meta")`."""
        pairs = torch.arange(0, self.head, 4, dtype=torch.float32, device="cpu")
        return 10000.0 ** (-pairs / self.head)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GridRotary:
        """Follow the module to another device, and undo everything else.

        Every conversion of a module comes through here: `to`, `bfloat16`, `to_empty`. The last one
        leaves memory as it finds it, so the values are computed anew, not copied.
        """
        super()._apply(fn, recurse)
        device = self.frequencies.device
        self.frequencies = self._compute()
        if device.type != "meta":
            self.frequencies = self.frequencies.to(device)
        return self

    def forward(self, side: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a square grid, row after row: fp32 [side^2, head / 2]."""
        angle = torch.arange(side, device=self.frequencies.device)[:, None] * self.frequencies
        rows = angle[:, None].expand(side, side, -1)
        columns = angle[None].expand(side, side, -1)
        both = torch.cat((rows, columns), dim=-1).flatten(0, 1)
        return both.cos(), both.sin()


class VisionTower(nn.Module):
    """Patches, blocks, and a linear layer over all patches that says what the image shows.

    Rotary positions are relative: from the mean over the patches a 6 and a 9 would look alike.
    """

    def __init__(
        self, *, layers: int = 2, width: int = 64, heads: int = 4, classes: int = 10
    ) -> None:
        """Build the tower with its weights drawn from torch's current random state.

        Raises:
            ValueError: the sizes do not fit together.
        """
        super().__init__()
        if width % (4 * heads):
            raise ValueError(f"width is {width}: it must be a multiple of 4 x heads = {4 * heads}")
        config = GPTConfig(layers=layers, width=width, heads=heads, sequence=GRID**2)
        size = (FRAMES, PATCH, PATCH)
        self.patches = nn.Conv3d(1, width, size, stride=size, bias=False)
        self.rotary = GridRotary(width // heads)
        self.blocks = nn.ModuleList(Block(config, causal=False) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(GRID**2 * width, classes, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every weight anew, so that nothing is left of what `to_empty` found in memory."""
        nn.init.normal_(self.patches.weight, std=self.patches.weight[0].numel() ** -0.5)
        for block in self.blocks:
            block.reset_parameters()
        self.norm.reset_parameters()
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Say what images show.

        Args:
            images: brightness, about 0 on average, [batch, SIDE, SIDE], of any floating dtype.

        Returns:
            fp32 logits [batch, classes].
        """
        video = images[:, None, None].expand(-1, 1, FRAMES, -1, -1)
        x = self.patches(video.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        cos, sin = (table.to(x.dtype) for table in self.rotary(GRID))
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x).flatten(1)).float()
